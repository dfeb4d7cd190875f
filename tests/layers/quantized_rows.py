"""Quantized rows, one group at a time, as `configs/cache.py` declares them."""

import ml_dtypes
import numpy as np

from configs.cache import PageFormat

_LARGEST = {"int8": [127], "fp8": [448, 416, 384, 352, 320, 288, 256], "int4": [7]}


def numbers(row_TX: np.ndarray, page_format: PageFormat) -> np.ndarray:
    """What a reader finds of rows of finite numbers: [T, X] in float64, unrounded."""
    found_TX = np.zeros(row_TX.shape)
    for part in _groups(page_format):
        for t, own in enumerate(np.float32(row_TX[:, part])):
            found_TX[t, part] = _read(own, page_format.dtype)
    return found_TX


def _read(own: np.ndarray, format: str) -> np.ndarray:
    largest, choices = np.abs(own).max(), []
    for most in _LARGEST[format]:
        scale = np.float32((largest * np.float32(1 / most)).astype(ml_dtypes.bfloat16))
        if scale < 1.2e-38:
            return np.zeros(own.shape)
        multiples = own * (np.float32(1) / scale)
        error = _four_bits(multiples) * scale - own
        share = np.rint(error * (np.float32(1) / largest) * np.float32(2**14))
        choices.append(((share**2).sum(), -most, float(scale) * _nearest(multiples, format)))
    return min(choices, key=lambda choice: choice[:2])[2]


def _groups(page_format: PageFormat) -> list[slice]:
    """Elements that share a scale: of four bits 32, else 64 of a head's key or value, or of what is
    latent or rotary; all of it where that is no multiple.
    """
    K, H, C = page_format.kv_heads, page_format.key_width, page_format.value_width
    parts = [C, H - C] if page_format.values_in_keys else [*[H] * K, *[C] * K]
    found, start = [], 0
    for width in parts:
        size = 32 if page_format.dtype == "int4" else width if width % 64 else 64
        found += [slice(start + at, start + at + size) for at in range(0, width, size)]
        start += width
    return found


def _nearest(multiples: np.ndarray, format: str) -> np.ndarray:
    most = _LARGEST[format][0]
    if format == "fp8":
        return np.clip(multiples, -most, most).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.clip(np.rint(multiples), -most, most).astype(np.float64)


def _four_bits(x: np.ndarray) -> np.ndarray:
    """Rounded to as many significant bits, to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFFF + (bits >> 20 & 1)) & np.uint32(0xFFF00000)).view(np.float32)
