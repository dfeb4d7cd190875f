"""Batches of whole sequences, of which the answers are learned, each epoch in another order."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.training.answers import Answered
from inference.training.windows import Order

_MULTIPLE = 64  # of inputs, that rows of a sequence each have


def can_share_rows(model: ModelConfig) -> bool:
    """Whether sequences of a row can be kept apart: by the mask of attention, but no state begins
    anew within a row, and what is chosen or pooled is so of whole rows.
    """
    return all(
        isinstance(layer.mixer, Attention)
        or (isinstance(layer.mixer, Latent) and layer.mixer.indexer is None)
        for layer in model.pattern
    )


class PackedAnswers:
    """`loop.Data`: `batch` windows of up to W inputs (W is `window`), filled with whole sequences
    one behind the other, none of which sees another. Without `shares_rows` a window is several rows
    of equal length instead, one for each sequence.

    Attributes:
        count: windows.
        padding: share of their inputs that are none.
    """

    def __init__(
        self,
        sequences: Sequence[Answered],
        window: int,
        batch: int,
        seed: int,
        shares_rows: bool = True,
    ):
        lengths = [len(sequence.tokens) - 1 for sequence in sequences]
        self._width = window if shares_rows else _width(max(lengths), window)
        self._rows = window // self._width
        rows = packed(lengths, window) if shares_rows else [[n] for n in range(len(lengths))]
        self._sequences = sequences
        self._windows = [rows[n : n + self._rows] for n in range(0, len(rows), self._rows)]
        self.count = len(self._windows)
        self.padding = 1 - sum(lengths) / (self.count * self._rows * self._width)
        self._order = Order(self.count, batch, seed)

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The batch of `filled`, [batch, rows, width] each; a function of seed and step alone."""
        windows = [self._windows[place] for place in self._order.batch(step)]
        whole = [window + [[]] * (self._rows - len(window)) for window in windows]
        rows = [[[self._sequences[n] for n in row] for row in window] for window in whole]
        return filled(rows, self._width)


class Pairs:
    """`loop.Data`: `batch` windows of two rows, an answer that is chosen and one that is not.

    Attributes:
        count: pairs.
    """

    def __init__(self, pairs: Sequence[Sequence[Answered]], window: int, batch: int, seed: int):
        self.count, self._pairs = len(pairs), pairs
        longest = max(len(sequence.tokens) - 1 for pair in pairs for sequence in pair)
        self._width = _width(longest, window)
        self._order = Order(self.count, batch, seed)

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The batch of `filled`, [batch, 2, width] each; a function of seed and step alone."""
        pairs = [self._pairs[place] for place in self._order.batch(step)]
        return filled([[[sequence] for sequence in pair] for pair in pairs], self._width)


def policy_batch(
    sequences: Sequence[Answered], window: int, num_parts: int, shares_rows: bool
) -> dict[str, np.ndarray]:
    """The batch of `filled`, [Y, 1, W] each, of all these sequences: as many rows as they need, up
    to the next power of two of each of `num_parts` equal parts, so that few shapes occur.
    """
    lengths = [len(sequence.tokens) - 1 for sequence in sequences]
    width = window if shares_rows else _width(max(lengths), window)
    rows = packed(lengths, window) if shares_rows else [[n] for n in range(len(lengths))]
    part = 1 << (-(-len(rows) // num_parts) - 1).bit_length()
    rows += [[]] * (num_parts * part - len(rows))
    return filled([[[sequences[n] for n in row]] for row in rows], width)


def filled(rows: Sequence[Sequence[Sequence[Answered]]], width: int) -> dict[str, np.ndarray]:
    """A batch of sequences in rows in windows, [Y, S, W] each: "tokens" i32, which are read,
    "targets" i32, "position" i32 of each in its sequence, "is_valid" bool, and "weight" float32 of
    each target, 0 unless it is a token of an answer. The mean of weighted losses over all of a
    batch is their mean over tokens of answers, however many of these any part of it has. Figures of
    targets are float32, by the names that the first sequence gives them.
    """
    shape = len(rows), len(rows[0]), width
    tokens, targets, position = (np.zeros(shape, np.int32) for _ in range(3))
    is_valid, is_answer = np.zeros(shape, bool), np.zeros(shape, bool)
    figures = {name: np.zeros(shape, np.float32) for name in rows[0][0][0].figures}
    for y, window in enumerate(rows):
        for s, row in enumerate(window):
            start = 0
            for sequence in row:
                length = len(sequence.tokens) - 1
                place = y, s, slice(start, start + length)
                tokens[place], targets[place] = sequence.tokens[:-1], sequence.tokens[1:]
                position[place], is_valid[place] = np.arange(length), True
                is_answer[place] = sequence.is_answer[1:]
                for name, values in figures.items():
                    values[place] = sequence.figures[name]
                start += length
    weight = is_answer * np.float32(is_answer.size / max(is_answer.sum(), 1))
    return {
        "tokens": tokens, "targets": targets, "position": position, "is_valid": is_valid,
        "weight": weight, **figures,
    }  # fmt: skip


def _width(longest: int, window: int) -> int:
    """Of rows of a sequence each: of few divisors, blocks of logits would be small."""
    return min(-(-longest // _MULTIPLE) * _MULTIPLE, window)


def packed(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of lengths in bins, the longest first, each in the fullest bin that has room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is free of a bin, and its index, in order
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(index)
        bisect.insort(rooms, (room - lengths[index], number))
    return bins
