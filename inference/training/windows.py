"""Batches of windows of a long row of token ids, each epoch in another order."""

import functools
from collections.abc import Sequence

import numpy as np

from configs.errors import InputError


class Order:
    """Which of `count` things the batches of steps hold: all in each epoch, in an order that
    follows from `seed`.
    """

    def __init__(self, count: int, batch: int, seed: int):
        self._count, self._batch, self._seed = count, batch, seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """Indices below `count`; a function of seed and step alone."""
        first = step * self._batch
        places = (divmod(nth, self._count) for nth in range(first, first + self._batch))
        return [int(self._order(epoch)[place]) for epoch, place in places]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)


class Windows:
    """`loop.Data`: `batch` windows a step, in an order that follows from `seed`. Each has W + 1
    tokens (W is `window`), of which all but the first are predicted.

    Raises:
        InputError: there is no whole window.
    """

    def __init__(self, tokens: np.ndarray, window: int, batch: int, seed: int):
        self._tokens, self._window = tokens, window
        self.count = (len(tokens) - 1) // window
        if self.count < 1:
            raise InputError(
                f"the text has {len(tokens)} tokens, training.window={window} takes at least "
                f"{window + 1}: give more text, or --set training.window"
            )
        self._order = Order(self.count, batch, seed)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{"tokens": i32[batch, W + 1]}; a function of seed and step alone."""
        return {"tokens": self.rows(self.places(step))}

    def places(self, step: int) -> list[int]:
        """Numbers of the windows of a step."""
        return self._order.batch(step)

    def rows(self, places: Sequence[int]) -> np.ndarray:
        """Windows by number, i32 [places, W + 1]."""
        starts = (place * self._window for place in places)
        rows = [self._tokens[start : start + self._window + 1] for start in starts]
        return np.asarray(rows, np.int32)
