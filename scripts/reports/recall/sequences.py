"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): pairs of a key and a value,
then the keys once more, each of which has its value as the answer.

A row is `k v k v .. k v` and then queries, one key each, between fillers: the answer is asked for
where a query stands, and never shown. How far behind the pairs a key is asked for follows the power
law of the paper, whose density falls as x ** -0.99.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scripts.reports.recall.recipes import FILLER, NUM_KEYS, NUM_VALUES, Task

_POWER = 0.01  # a of the law, whose density is a x ** (a - 1)
_KEYS = FILLER + 1
_VALUES = _KEYS + NUM_KEYS
_TRAINED, _HELD_OUT = 0, 1  # streams of random numbers


class Rows(NamedTuple):
    """Sequences with their questions.

    Attributes:
        tokens: i32[Y, W].
        positions: i32[Y, J] of the queries in their rows.
        answers: i32[Y, J], the value of each query's key.
        weights: f32[Y, J] of each answer in the loss, which sum to 1 in a row; 0 where a row has
            fewer queries.
    """

    tokens: np.ndarray
    positions: np.ndarray
    answers: np.ndarray
    weights: np.ndarray


class Sequences:
    """`loop.Data`: rows of several tasks in turn, no two of them alike.

    Args:
        tasks: of one length, each as often in a batch as it is named.
        batch: rows a step.
        seed: of what is drawn.
    """

    def __init__(self, tasks: Sequence[Task], batch: int, seed: int):
        (self._length,) = {task.length for task in tasks}
        self._counts = [tasks[row % len(tasks)].num_pairs for row in range(batch)]
        self._seed = seed

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`Rows` as a dict; a function of tasks, seed and step alone."""
        rng = np.random.default_rng((_TRAINED, self._seed, self._length, step))
        return drawn(rng, self._length, self._counts)._asdict()


def held_out(task: Task, num_rows: int) -> Rows:
    """Rows that no training draws, the same for all models."""
    rng = np.random.default_rng((_HELD_OUT, task.length, task.num_pairs))
    return drawn(rng, task.length, [task.num_pairs] * num_rows)


def drawn(rng: np.random.Generator, length: int, counts: Sequence[int]) -> Rows:
    """A row for each number of pairs."""
    num_pairs, num_rows = max(counts), len(counts)
    keys = _KEYS + _distinct(rng, np.zeros(NUM_KEYS), num_rows, num_pairs)
    values = _VALUES + _distinct(rng, np.zeros(NUM_VALUES), num_rows, num_pairs)
    tokens = np.full((num_rows, length), FILLER, np.int32)
    positions = np.zeros((num_rows, num_pairs), np.int32)
    answers = np.zeros((num_rows, num_pairs), np.int32)
    weights = np.zeros((num_rows, num_pairs), np.float32)
    for count in set(counts):
        (of,) = np.nonzero(np.asarray(counts) == count)
        tokens[of, : 2 * count : 2] = keys[of, :count]
        tokens[of, 1 : 2 * count : 2] = values[of, :count]
        places = np.arange(1, (length - 2 * count) // 2 + 1)
        gaps = _distinct(rng, (_POWER - 1) * np.log(places), len(of), count)
        positions[of, :count] = 2 * count + 2 * gaps
        tokens[of[:, None], positions[of, :count]] = keys[of, :count]
        answers[of, :count], weights[of, :count] = values[of, :count], 1 / count
    return Rows(tokens, positions, answers, weights)


def _distinct(
    rng: np.random.Generator, log_weights: np.ndarray, num_rows: int, count: int
) -> np.ndarray:
    """Drawn one after the other without replacement, by their weights: i64[num_rows, count]."""
    noise = rng.gumbel(size=(num_rows, len(log_weights)))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count]
