"""Integers of few bits in words of 32, one behind the other from a word's lowest bit on, over the
ends of words where bits do not divide 32; or, as compressed-tensors had them before 0.18, as many
as a word has room for.
"""

import numpy as np

WORD = 32  # bits


def unpack(words_FX: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The integers: uint8 [F, count].

    Args:
        words_FX: int32, in number one of `lengths`.
        bits: of an integer, 8 at most.
        count: of a row's integers; what is behind them is padding.
    """
    data = np.ascontiguousarray(words_FX).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)[:, :count]
    if words_FX.shape[1] != num_words(count, bits):
        shifts = np.arange(WORD // bits, dtype=np.uint32) * np.uint32(bits)
        apart = data.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
        return apart.reshape(len(data), -1)[:, :count].astype(np.uint8)
    flat = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(flat.reshape(len(data), count, bits), axis=-1, bitorder="little")[..., 0]


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


def lengths(count: int, bits: int) -> tuple[int, ...]:
    """Numbers of words that so many integers may take, ours first."""
    return num_words(count, bits), -(-count // (WORD // bits))


def num_words(count: int, bits: int) -> int:
    """Words that so many integers take."""
    return -(-count * bits // WORD)
