"""Rates of the machine at hand, measured."""

import functools
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configs.hardware.spec import HardwareSpec
from inference.files import local_machine


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
        cores = local_machine.num_cores()
        size = num_bytes // 4 // cores
        self._num_bytes, self._pool = 4 * size * cores, ThreadPoolExecutor(cores)
        self._parts = list(self._pool.map(lambda _: np.ones(size, np.float32), range(cores)))

    def read(self, repeats: int = 5) -> float:
        """Bytes a second that all cores together read: the best of several passes."""
        return self._num_bytes / min(self._once() for _ in range(repeats))

    def close(self) -> None:
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
    from layers.kernels.cpu import library

    return _product_rate(_matrix(dtype, library.is_loaded()), repeats)


def few_bits_rates(formats: Iterable[str]) -> dict[str, float]:
    """FLOPs a second with weights in formats of few bits, as `HardwareSpec.rates` has them."""
    from configs.precision import FORMATS

    return {FORMATS[format].measured: matmul_rate(format) for format in formats}


def best_matmul_rate(formats: Iterable[str]) -> float:
    """The same of the fastest product there is with weights in one of these formats: XLA's, and
    that of packed weights where this process has the library.
    """
    from configs.precision import ROW_FORMATS
    from layers.kernels.cpu import library
    from layers.kernels.linear import packed

    ways = (False, True) if library.is_loaded() else (False,)
    return max(
        _product_rate(_matrix(format, packs))
        for format in formats
        for packs in ways
        if packs or format not in packed.BLOCKS or format in ROW_FORMATS
    )


def peaks() -> dict[str, float]:
    """FLOPs a second (of int8: operations) that all cores together reach at most, the best of
    three times 10 ms, by loops of multiply-adds on registers: those of each instruction
    set and type ('avx512 float32') that this processor has. Without the library none are known.
    """
    from layers.kernels.cpu import library

    if not library.is_loaded():
        return {}
    cores = local_machine.num_cores()
    peaks: dict[str, float] = {}
    with ThreadPoolExecutor(cores) as pool:
        for name in library.INSTRUCTION_SETS:
            for dtype in ("float32", "bfloat16", "int8"):
                once = functools.partial(library.peak, name, dtype, 0.01)
                if once():
                    every = ([pool.submit(once) for _ in range(cores)] for _ in range(3))
                    rates = (sum(future.result() for future in futures) for futures in every)
                    peaks[f"{name} {dtype}"] = max(rates)
    return peaks


def product_peak(format: str, peaks: Mapping[str, float]) -> float | None:
    """Of `peaks`, the highest that products with weights in a format can reach; None: unknown."""
    from configs.precision import FORMATS, IN_FLOAT32

    is_few = FORMATS[format].is_quantized and format not in IN_FLOAT32
    for dtype in ("int8" if is_few else format, "float32"):
        rates = [rate for name, rate in peaks.items() if name.split()[1] == dtype]
        if rates:
            return max(rates)
    return None


_ROWS, _WIDTH = 512, 2048


def _matrix(format: str, packs: bool) -> object:
    """A square matrix of a format, as `linear` takes it."""
    import jax
    import jax.numpy as jnp

    from configs.precision import FORMATS
    from layers.kernels.linear import low_bit, packed

    if format in packed.BLOCKS and packs:
        strips = packed.abstract((_WIDTH, _WIDTH), format)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), strips)
    if format in packed.BLOCKS:
        num_bytes = FORMATS[format].row_bytes(_WIDTH)
        return low_bit.of_blocks(np.zeros((_WIDTH, num_bytes), np.uint8), format, _WIDTH, "float32")
    matrix = jnp.ones((_WIDTH, _WIDTH), format)
    return packed.pack(matrix) if packs else matrix


def _product_rate(w: object, repeats: int = 5) -> float:
    import jax
    import jax.numpy as jnp

    from layers.linear import linear

    product, x = jax.jit(linear), jnp.ones((_ROWS, _WIDTH), jnp.float32)
    product(x, w).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(x, w).block_until_ready()
        return time.perf_counter() - start

    return 2 * _ROWS * _WIDTH * _WIDTH / min(once() for _ in range(repeats))
