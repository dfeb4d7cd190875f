"""How many pages the coming steps will need: a simulation on the host, by which the scheduler
admits as many sequences as fit to their end, instead of preempting what it should not have begun.
"""

import bisect
import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np


class LengthStatistics:
    """Output lengths of finished requests (the newest `size`), and what they say of running
    ones.
    """

    def __init__(self, size: int = 256):
        self._size = size
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums = [0]  # entry i: of the i longest

    def record(self, num_output_tokens: int) -> None:
        """Adds a finished request, and forgets the oldest where there are more than `size`."""
        if len(self._newest) == self._size:
            del self._sorted[bisect.bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(num_output_tokens)
        bisect.insort(self._sorted, num_output_tokens)
        self._sums = [0, *itertools.accumulate(reversed(self._sorted))]

    def remaining(self, num_output_tokens: int, most: int) -> int:
        """Expected tokens still to come of a request that has generated as many and may generate
        `most` more: the mean of what the longer ones went on for, rounded up; `most` where none
        was longer.
        """
        num_longer = len(self._sorted) - bisect.bisect_right(self._sorted, num_output_tokens)
        if not num_longer:
            return most
        return min(most, -(-self._sums[num_longer] // num_longer) - num_output_tokens)


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a sequence holds now and will come to hold.

    Attributes:
        num_tokens: tokens in the cache once this step has run.
        remaining: tokens it grows by afterwards, one a step; 0 or more. A request's last token is
            never fed: one that generates n more, this step's included, grows by n - 1.
        num_shared_pages: a group, its leading pages that are counted elsewhere; empty for none.
    """

    num_tokens: int
    remaining: int
    num_shared_pages: tuple[int, ...] = ()


def peak_pages(
    demands: Sequence[Demand],
    windows: Sequence[int | None],
    page_tokens: int,
    horizon: int | None = None,
) -> tuple[int, ...]:
    """Most pages a group that these sequences hold together in this step or a coming one, each
    growing by one token a step and giving its pages back when its remaining tokens are done.

    A prompt is taken to be in the cache whole from this step on. Two things are not counted: one
    that takes k steps more to compute ends k steps later (with `remaining` raised by k the peak is
    a bound again), and a group with a window holds pages for all tokens of a prompt that are fed
    at once.

    Args:
        demands: the sequences.
        windows: a group, the window of its `CacheSpec`.
        page_tokens: tokens a page holds.
        horizon: steps to look at after this one; None looks until all are done. Time grows with
            the steps looked at.
    """
    if not demands:
        return (0,) * len(windows)
    num_tokens = np.array([demand.num_tokens for demand in demands])
    remaining = np.array([demand.remaining for demand in demands])
    last = int(remaining.max())
    if horizon is not None:
        last = min(last, horizon)
    peaks = []
    for group, window in enumerate(windows):
        shared = [d.num_shared_pages[group] if d.num_shared_pages else 0 for d in demands]
        peaks.append(_peak(num_tokens, remaining, np.array(shared), window, page_tokens, last))
    return tuple(peaks)


def _peak(
    num_tokens: np.ndarray,
    remaining: np.ndarray,
    num_shared_pages: np.ndarray,
    window: int | None,
    page: int,
    last: int,
) -> int:
    """The largest sum over steps 0 to `last` of what the sequences hold in one group.

    Each sequence takes a page every `page` steps, and with a window that has moved past the first
    page of its own gives one back as often. Such a series is two marks: one at its first step, one
    behind its last. In a table whose rows are `page` steps, marks summed down the columns are the
    changes of each step, and changes summed over the steps are the pages held. So the work grows
    with sequences and steps, not with their product.
    """
    table = np.zeros((last // page + 2, page), np.int64)
    steps = table.reshape(-1)  # reaches beyond `last`: its end takes all that comes later
    end = steps.size - 1

    def change_every_page(first: np.ndarray, by: int) -> None:
        behind = first + np.maximum(0, -(-(remaining + 1 - first) // page)) * page
        np.add.at(steps, np.minimum(first, end), by)
        np.add.at(steps, np.minimum(behind, end), -by)

    def held(num_tokens: np.ndarray) -> np.ndarray:
        """Pages from the first that is neither shared nor out of the newest token's sight."""
        gone = num_shared_pages
        if window is not None:
            gone = np.maximum(gone, (num_tokens - window) // page)
        return -(-num_tokens // page) - gone

    change_every_page(1 + -num_tokens % page, +1)
    if window is not None:
        past = window - num_tokens  # the step at which the window begins to move
        own = past + (num_shared_pages + 1) * page
        change_every_page(np.maximum(own, 1 + (past - 1) % page), -1)
    np.cumsum(table, axis=0, out=table)
    steps[0] += held(num_tokens).sum()
    np.subtract.at(steps, np.minimum(remaining + 1, end), held(num_tokens + remaining))
    return int(np.cumsum(steps, out=steps)[: last + 1].max())
