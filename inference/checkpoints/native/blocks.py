"""Arrays of bytes that hold a parameter's blocks, [F, bytes of a row] or [E, F, bytes]."""

from collections.abc import Mapping

import numpy as np

from configs.errors import InputError
from configs.kinds.params import ParamInfo
from configs.precision import FORMATS
from layers import quantized

PARTS = "int8", "outliers", "features"  # of a matrix in `llm_int8`


def layout(info: ParamInfo) -> tuple[tuple[int, ...], str]:
    """Shape and type of the array that keeps a parameter."""
    format, row = FORMATS[info.format], info.shape[-1]
    if not format.is_quantized:
        return info.shape, info.format
    return (*info.shape[:-1], format.row_bytes(row)), "uint8"


def are_in(info: ParamInfo, shape: tuple[int, ...], dtype: str, label: str) -> bool:
    """Whether an array holds a parameter's blocks, and not its numbers.

    Raises:
        InputError: it holds something else than blocks where blocks are declared, or blocks of
            another size.
    """
    expected, stored_as = layout(info)
    if stored_as != "uint8":
        if dtype == "uint8":
            raise InputError(f"{label} holds blocks, and config.json names no format for them")
        return False
    if dtype != stored_as or shape != expected:
        raise InputError(
            f"{label} is {dtype} {list(shape)}; in {info.format}, scales included, "
            f"{list(info.shape)} is uint8 {list(expected)}"
        )
    return True


def numbers(info: ParamInfo, blocks: np.ndarray) -> np.ndarray:
    """What some of a parameter's blocks stand for: float32 [..., D] of uint8 [..., bytes]."""
    width, lead = info.shape[-1], blocks.shape[:-1]
    rows = np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1])
    return quantized.dequantize(info.format, rows, width).reshape(*lead, width)


def joined(parts: Mapping[str, np.ndarray], width: int) -> np.ndarray:
    """What the parts of a matrix in `llm_int8`, or some rows of the first two, stand for: float32
    [F, width].

    Args:
        parts: `int8`, blocks of `w8a8` [F, bytes]; `outliers`, numbers [F, 32]; and `features`,
            int32 [32], which columns these are.
        width: columns.
    """
    whole_FD = quantized.dequantize("w8a8", parts["int8"], width)
    whole_FD[:, parts["features"]] = parts["outliers"].astype(np.float32)
    return whole_FD
