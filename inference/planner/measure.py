"""Rates of the machine at hand, by the clock."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configs.hardware.spec import HardwareSpec


def this_machine(*dtypes: str) -> HardwareSpec:
    """The machine at hand: its memory, its measured read bandwidth, and its measured rates in these
    types (without any: it computes for nothing).
    """
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    rates = {dtype: matmul_rate(dtype) for dtype in dtypes}
    return HardwareSpec("cpu", memory, read_bandwidth(), rates)


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(num_bytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes a second that all cores together read from memory: the best of several passes of a dot
    product.
    """
    cores = num_cores()
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), cores)

    def once(pool: ThreadPoolExecutor) -> float:
        start = time.perf_counter()
        list(pool.map(lambda part: float(np.dot(part, part)), parts))
        return time.perf_counter() - start

    with ThreadPoolExecutor(cores) as pool:
        return num_bytes / min(once(pool) for _ in range(repeats))


def matmul_rate(dtype: str, repeats: int = 5) -> float:
    """FLOPs a second of `linear` for [512, 2048] x [2048, 2048], the best of several."""
    import jax
    import jax.numpy as jnp

    from layers.linear import linear

    rows, width = 512, 2048
    product = jax.jit(linear)
    x, w = jnp.ones((rows, width), jnp.float32), jnp.ones((width, width), dtype)
    product(x, w).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(x, w).block_until_ready()
        return time.perf_counter() - start

    return 2 * rows * width * width / min(once() for _ in range(repeats))
