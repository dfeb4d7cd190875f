"""Rates of the machine at hand, measured."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configs.hardware.spec import HardwareSpec
from inference.planner.calibration import store


def this_machine(*dtypes: str) -> HardwareSpec:
    """The machine at hand: its memory, its measured read bandwidth, and its measured rates in these
    types (without any, computing costs nothing).
    """
    rates = {dtype: matmul_rate(dtype) for dtype in dtypes}
    return HardwareSpec("cpu", this_memory(), read_bandwidth(), rates)


def this_memory() -> float:
    """Bytes of the machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Probe:
    """Reads the same memory again and again on all cores, each a dot product of its own part."""

    def __init__(self, num_bytes: int = 256 << 20):
        cores = store.num_cores()
        self._num_bytes, self._pool = num_bytes, ThreadPoolExecutor(cores)
        self._parts = np.array_split(np.ones(num_bytes // 4, np.float32), cores)

    def read(self, repeats: int = 3) -> float:
        """Bytes a second that all cores together read: the best of several passes."""
        return self._num_bytes / min(self._once() for _ in range(repeats))

    def close(self) -> None:
        """Stops its threads."""
        self._pool.shutdown()

    def _once(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda part: float(np.dot(part, part)), self._parts))
        return time.perf_counter() - start


def read_bandwidth(num_bytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes a second that all cores together read from memory, the best of several passes."""
    probe = Probe(num_bytes)
    try:
        return probe.read(repeats)
    finally:
        probe.close()


def matmul_rate(dtype: str, repeats: int = 5) -> float:
    """FLOPs a second of `linear` for [512, 2048] x [2048, 2048], the best of several runs; with
    packed weights where this process has the library.
    """
    import jax
    import jax.numpy as jnp

    from layers.kernels.cpu import library
    from layers.kernels.linear import packed
    from layers.linear import linear

    rows, width = 512, 2048
    product = jax.jit(linear)
    x, matrix = jnp.ones((rows, width), jnp.float32), jnp.ones((width, width), dtype)
    w = packed.pack(matrix) if library.is_loaded() else matrix
    product(x, w).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(x, w).block_until_ready()
        return time.perf_counter() - start

    return 2 * rows * width * width / min(once() for _ in range(repeats))
