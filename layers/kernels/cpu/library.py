"""The native library of CPU kernels, once it is loaded: XLA knows its functions by name, numpy its
packing of weights. What it computes, and how it is built, stands in `src/` and `build.py`.
"""

import ctypes
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from configs.errors import InputError
from configs.precision import FORMATS

LAYOUT = 6  # of packed weights and of the functions' arguments: part of every name that XLA keeps
STRIP, DEPTH = 16, 32  # features of a strip, what its depth is a multiple of (src/kernels.h)
LINE = 64  # bytes: what strips of blocks are a multiple of (src/blocks.h)
_NAMES = (
    *("linear", "gated", "grouped", "lookup", "attend", "scores", "bounds"),
    *("norm", "gate", "summarize", "choose", "append", "zeros"),
    *("update", "scan", "convolve"),
)
(
    LINEAR, GATED, GROUPED, LOOKUP, ATTEND, SCORES, BOUNDS,
    NORM, GATE, SUMMARIZE, CHOOSE, APPEND, ZEROS, UPDATE, SCAN, CONVOLVE,
) = (f"ridgeline_{name}_{LAYOUT}" for name in _NAMES)  # fmt: skip

INSTRUCTION_SETS = (  # of an architecture the fastest first
    *("amx", "avx512bf16", "avx512vnni", "avx512", "avx2"),
    *("neonbf16", "neondotprod", "neon"),
)
_FAULTS = -2.0  # instead of seconds; -1: the processor lacks it

_library: ctypes.CDLL | None = None
_instruction_set = ""  # in use


class Trials(NamedTuple):
    """How this processor did with `INSTRUCTION_SETS`."""

    usable: tuple[str, ...]
    faulty: tuple[str, ...]  # that it claims, and does not know an instruction of


def is_loaded() -> bool:
    """Whether this process has the kernels."""
    return _library is not None


def load(path: Path) -> Trials:
    """Loads the library, tries all instruction sets and takes the first that is usable. Raises
    OSError if it is not the library of these kernels, another one was loaded before, or this
    processor lacks what all its kernels need.
    """
    global _library
    library = ctypes.CDLL(str(path))
    try:
        functions = [(f"ridgeline_{n}_{LAYOUT}", library[f"ridgeline_{n}"]) for n in _NAMES]
        library.ridgeline_use.argtypes = library.ridgeline_try.argtypes = [ctypes.c_char_p]
        library.ridgeline_use.restype, library.ridgeline_try.restype = None, ctypes.c_double
        size = ctypes.c_int64
        library.ridgeline_pack.argtypes = [ctypes.c_void_p, size, size, size, size, ctypes.c_void_p]
        library.ridgeline_pack.restype = None
        name, pointer = ctypes.c_char_p, ctypes.c_void_p
        library.ridgeline_pack_blocks.argtypes = [name, pointer, size, size, size, pointer]
        library.ridgeline_pack_blocks.restype = ctypes.c_bool
        library.ridgeline_name_bus_errors.restype = None
        library.ridgeline_peak.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double]
        library.ridgeline_peak.restype = ctypes.c_double
    except AttributeError as error:
        raise OSError(f"not the library of Ridgeline's kernels ({error})") from None
    tried = {name: library.ridgeline_try(name.encode()) for name in INSTRUCTION_SETS}
    usable = tuple(name for name, seconds in tried.items() if seconds >= 0)
    if not usable:
        raise OSError("this processor lacks what x86-64-v3 has, AVX2 and FMA among it")
    try:
        for target, function in functions:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    except RuntimeError as error:  # another one has taken the names
        raise OSError(str(error)) from None
    library.ridgeline_name_bus_errors()  # of weights, which are mapped
    _library = library
    use(usable[0])
    return Trials(usable, tuple(name for name, seconds in tried.items() if seconds == _FAULTS))


def use(instruction_set: str) -> str:
    """Selects one of `INSTRUCTION_SETS`, or raises InputError; returns the last one."""
    global _instruction_set
    assert _library is not None
    if product_seconds(instruction_set) < 0:
        raise InputError(f"this processor has no {instruction_set}")
    _library.ridgeline_use(instruction_set.encode())
    before, _instruction_set = _instruction_set, instruction_set
    return before


def product_seconds(instruction_set: str) -> float:
    """Seconds of one product of 32 rows of bfloat16 with 128 features of depth 1,024 in the second
    cache, by one of `INSTRUCTION_SETS`; negative where it is not usable.
    """
    assert _library is not None
    return _library.ridgeline_try(instruction_set.encode())


def peak(instruction_set: str, type: str, seconds: float) -> float:
    """FLOPs (of integers: operations) a second of the calling thread's core, by multiply-adds of a
    type in one of `INSTRUCTION_SETS`; 0 where it is not usable or has none.
    """
    assert _library is not None
    if product_seconds(instruction_set) < 0:
        return 0.0
    return _library.ridgeline_peak(instruction_set.encode(), type.encode(), seconds)


def pack(rows_FD: np.ndarray, strips: np.ndarray, multiple: int = DEPTH) -> None:
    """Lays a matrix [F, D], of 2 or 4 bytes an element, out in strips, as many elements padded to
    16 and to a multiple of the depth; both C-contiguous. Raises ValueError for other arrays.
    """
    assert _library is not None
    F, D = rows_FD.shape
    depth = -(-D // multiple) * multiple
    room = -(-F // STRIP) * STRIP * depth * rows_FD.itemsize
    if rows_FD.itemsize not in (2, 4) or strips.nbytes != room:
        raise ValueError(f"{rows_FD.dtype} {rows_FD.shape} does not fill {strips.nbytes} bytes")
    _need_contiguous(rows_FD, strips)
    _library.ridgeline_pack(rows_FD.ctypes.data, F, D, depth, rows_FD.itemsize, strips.ctypes.data)


def pack_blocks(format: str, blocks_FX: np.ndarray, D: int, strips: np.ndarray) -> None:
    """Lays a matrix [F, D] of blocks in `configs.precision.FORMATS`, uint8 [F, bytes of D numbers],
    out in strips, uint8 [strips, bytes of a strip]; both C-contiguous. Raises ValueError if the
    format has no blocks, or the arrays are not these.
    """
    assert _library is not None
    info = FORMATS.get(format)
    if info is None or not info.is_quantized:
        raise ValueError(f"{format!r} has no blocks")
    info.check_rows(D, "a matrix")
    F, size = blocks_FX.shape
    if strips.nbytes != -(-F // STRIP) * strip_bytes(format, D):
        raise ValueError(f"{F} rows do not fill {strips.nbytes} bytes")
    _need_contiguous(blocks_FX, strips)
    start, to = blocks_FX.ctypes.data, strips.ctypes.data
    if blocks_FX.dtype != np.uint8 or not _library.ridgeline_pack_blocks(
        format.encode(), start, F, size, D, to
    ):
        shared = f", whose rows share scales in {info.rows}s" if info.rows > 1 else ""
        raise ValueError(
            f"{blocks_FX.dtype} {blocks_FX.shape} is not the blocks of {D} {format}{shared}"
        )


def strip_bytes(format: str, D: int) -> int:
    """Of a strip of blocks: its rows are padded to whole groups, its bytes to whole lines."""
    depth = -(-D // DEPTH) * DEPTH
    return -(-int(FORMATS[format].bytes_for(STRIP * depth, depth)) // LINE) * LINE


def _need_contiguous(*arrays: np.ndarray) -> None:
    if not all(array.flags.c_contiguous for array in arrays):
        raise ValueError("packing takes arrays whose rows lie one after another")
