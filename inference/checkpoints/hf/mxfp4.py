"""MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits share a scale, a power of two."""

import functools

import ml_dtypes
import numpy as np

from layers import quantized
from layers.quantized import Groups

ENDINGS = ("_blocks", "_scales")  # of the names of the two tensors that stand for one
BLOCK = 32
MOST = 252  # of a scale: 6 * 2^(253 - 127) is beyond bfloat16, and 255 is no number

_OFFSET = 127
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers in bfloat16, which holds each of them.

    Args:
        blocks: uint8 [rows, blocks, 16], of two numbers the first in the low half of the byte.
        scales: uint8 [rows, blocks], at most `MOST`.
    """
    places = scales[..., None].astype(np.uint16) << 8 | blocks
    return _pairs()[places].view(ml_dtypes.bfloat16).reshape(len(blocks), -1)


def repacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same as blocks of ours: uint8 [rows, bytes of a row]; arguments as of `dequantize`."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - _OFFSET)
    return quantized.pack("mxfp4", Groups(codes, factors.astype(np.float32)))


@functools.cache
def _pairs() -> np.ndarray:
    """Two bfloat16 in 32 bits, for each scale and byte."""
    numbers = np.array([*_NUMBERS, *(-number for number in _NUMBERS)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    factors = np.ldexp(np.float32(1), np.arange(MOST + 1) - _OFFSET)
    scaled = (factors[:, None, None] * pairs).astype(ml_dtypes.bfloat16)
    return scaled.reshape(-1, 2).view(np.uint32).ravel()
