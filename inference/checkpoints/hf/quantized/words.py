"""Integers of few bits in words of 32, one behind the other from a word's lowest bit on, over the
ends of words where bits do not divide 32.
"""

import numpy as np

WORD = 32  # bits


def unpack(words_FX: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The integers: uint8 [F, count].

    Args:
        words_FX: int32.
        bits: of an integer, 8 at most.
        count: of a row's integers; what is behind them is padding.
    """
    data = np.ascontiguousarray(words_FX).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)[:, :count]
    flat = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little")
    parts = flat.reshape(len(data), count, bits)
    return np.packbits(parts, axis=-1, bitorder="little")[..., 0]


def pack(integers_FN: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack`, with zeros as padding: int32 [F, words]."""
    F, count = integers_FN.shape
    words = num_words(count, bits)
    flat = np.unpackbits(
        np.ascontiguousarray(integers_FN, np.uint8)[..., None], axis=-1, bitorder="little"
    )[..., :bits].reshape(F, -1)
    padded = np.zeros((F, words * WORD), np.uint8)
    padded[:, : flat.shape[1]] = flat
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def num_words(count: int, bits: int) -> int:
    """Words that so many integers take."""
    return -(-count * bits // WORD)
