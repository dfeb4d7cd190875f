"""Quantized rows in float64, one number at a time, as `configs/cache.py` declares them."""

import ml_dtypes
import numpy as np

from configs.cache import PageFormat

MOST = {"int8": 127, "fp8": 448, "int4": 7}


def numbers(row_TX: np.ndarray, page_format: PageFormat) -> np.ndarray:
    """What a reader finds of rows of finite numbers: [T, X] in float64, unrounded."""
    found_TX = np.zeros(row_TX.shape)
    for part in _groups(page_format):
        for t, own in enumerate(row_TX[:, part]):
            scale = _bfloat16(np.abs(own).max() / MOST[page_format.dtype])
            if scale:
                found_TX[t, part] = scale * _nearest(own / scale, page_format.dtype)
    return found_TX


def _groups(page_format: PageFormat) -> list[slice]:
    """Elements that share a scale: a head's key, its value, what is latent, what is rotary; or 32
    of one of these.
    """
    K, H, C = page_format.kv_heads, page_format.key_width, page_format.value_width
    parts = [C, H - C] if page_format.values_in_keys else [*[H] * K, *[C] * K]
    stops = np.cumsum(parts)
    found = [slice(stop - width, stop) for stop, width in zip(stops.tolist(), parts, strict=True)]
    if page_format.dtype != "int4":
        return found
    return [slice(at, at + 32) for part in found for at in range(part.start, part.stop, 32)]


def _nearest(multiples: np.ndarray, format: str) -> np.ndarray:
    if format == "fp8":
        return multiples.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.clip(np.rint(multiples), -MOST[format], MOST[format])


def _bfloat16(number: float) -> float:
    return float(np.float32(number).astype(ml_dtypes.bfloat16))
