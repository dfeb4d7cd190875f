"""The native library of CPU kernels, once it is loaded: XLA knows its functions by name, numpy its
packing of weights. What it computes, and how it is built, stands in `src/` and `build.py`.
"""

import ctypes
from pathlib import Path

import jax
import numpy as np

from configs.errors import InputError

LAYOUT = 2  # of packed weights and of the functions' arguments: part of every name that XLA keeps
STRIP, DEPTH = 16, 32  # features of a strip, what its depth is a multiple of (src/kernels.h)
LINE = 64  # bytes: what strips of blocks are a multiple of (src/blocks.h)
_NAMES = "linear", "lookup", "attend", "norm", "gate", "summarize"
LINEAR, LOOKUP, ATTEND, NORM, GATE, SUMMARIZE = (f"ridgeline_{name}_{LAYOUT}" for name in _NAMES)

_library: ctypes.CDLL | None = None


def is_loaded() -> bool:
    """Whether this process has the kernels."""
    return _library is not None


def load(path: Path) -> str:
    """Loads the library; the name of the instruction set that it uses here.

    Raises:
        OSError: it is not the library of these kernels, another one was loaded before, or this
            processor lacks what all its kernels need.
    """
    global _library
    found = ctypes.CDLL(str(path))
    try:
        functions = [(f"ridgeline_{n}_{LAYOUT}", found[f"ridgeline_{n}"]) for n in _NAMES]
        found.ridgeline_use.argtypes = [ctypes.c_char_p]
        found.ridgeline_use.restype = ctypes.c_char_p
        size = ctypes.c_int64
        found.ridgeline_pack.argtypes = [ctypes.c_void_p, size, size, size, ctypes.c_void_p]
        found.ridgeline_pack.restype = None
        name, pointer = ctypes.c_char_p, ctypes.c_void_p
        found.ridgeline_pack_blocks.argtypes = [name, pointer, size, size, pointer]
        found.ridgeline_pack_blocks.restype = ctypes.c_bool
    except AttributeError as error:
        raise OSError(f"not the library of Ridgeline's kernels ({error})") from None
    instruction_set = found.ridgeline_use(None)
    if instruction_set is None:
        raise OSError("this processor lacks what x86-64-v3 has, AVX2 and FMA among it")
    try:
        for target, function in functions:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    except RuntimeError as error:  # another one has taken the names
        raise OSError(str(error)) from None
    _library = found
    return str(instruction_set, "ascii")


def use(instruction_set: str | None) -> str:
    """Computes with another instruction set ('amx', 'avx512', 'avx2', 'neon') from now on; None is
    the best one that the processor has.

    Raises:
        InputError: the processor lacks it.
    """
    assert _library is not None
    name = _library.ridgeline_use(instruction_set and instruction_set.encode())
    if name is None:
        raise InputError(f"this processor has no {instruction_set}")
    return str(name, "ascii")


def pack(rows_FD: np.ndarray, strips: np.ndarray) -> None:
    """Lays a matrix of 2 or 4 bytes an element out in strips."""
    assert _library is not None and rows_FD.flags.c_contiguous and strips.flags.c_contiguous
    F, D = rows_FD.shape
    _library.ridgeline_pack(rows_FD.ctypes.data, F, D, rows_FD.itemsize, strips.ctypes.data)


def pack_blocks(format: str, blocks_FX: np.ndarray, D: int, strips: np.ndarray) -> None:
    """Lays a matrix [F, D] out in strips, whose rows are blocks of a GGUF file: uint8."""
    assert _library is not None and blocks_FX.flags.c_contiguous and strips.flags.c_contiguous
    start, to = blocks_FX.ctypes.data, strips.ctypes.data
    is_known = _library.ridgeline_pack_blocks(format.encode(), start, len(blocks_FX), D, to)
    assert is_known, (format, D)
