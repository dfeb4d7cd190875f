"""Which sequences may start: as many as will find pages until they end, by a simulation of the
coming steps on the host, instead of more that would have to be preempted.
"""

import bisect
import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence as Items

import numpy as np

from configs.engine import Config
from inference.kv_pages.prefix_cache import Match
from inference.scheduling import queue
from inference.scheduling.page_manager import PageManager
from inference.scheduling.sequence import Sequence

_PREEMPTIONS_TO_YIELD = 2  # after that a sequence starts only where all its tokens find room


class AdmissionControl:
    """Compares what the running sequences and one more will need with the pages there are."""

    def __init__(self, config: Config, pages: PageManager, lengths: "LengthStatistics"):
        """`lengths` are those of finished requests."""
        self._pages = pages
        self._page_tokens, self._max_context = config.page_tokens, config.max_context
        drafts = config.engine.drafts
        # A tree's nodes beside its longest branch, whose tokens are awaited.
        self._num_branching = max(0, drafts.num_drafts - drafts.levels)
        groups = config.cached_model.page_groups
        self._windows = [group.spec.sliding(config.page_tokens) for group in groups]
        self._lengths = lengths

    def will_fit(self, candidate: Sequence, match: Match, running: Items[Sequence]) -> bool:
        """Whether a waiting sequence and those that run find pages until they end, as far as the
        lengths of earlier ones tell. One that was preempted repeatedly starts only where even the
        longest outputs fit, and so is not preempted again.
        """
        if not running:
            return True
        is_patient = candidate.history.num_preemptions >= _PREEMPTIONS_TO_YIELD
        ahead = running
        if is_patient:
            ahead = [s for s in running if queue.rank(s) < queue.rank(candidate)]
        demands = [self._demand(s, s.prefix.num_cached_tokens, is_patient) for s in ahead]
        demands.append(self._demand(candidate, match.num_tokens, is_patient))
        peak = peak_pages(demands, self._windows, self._page_tokens)
        shared = self._pages.num_shared_pages(running, match)
        usable = self._pages.pool.num_usable_pages[: len(peak)]
        return all(a + b <= n for a, b, n in zip(peak, shared, usable, strict=True))

    def _demand(self, sequence: Sequence, num_cached_tokens: int, is_longest: bool) -> "Demand":
        remaining = sequence.num_remaining_tokens
        if not is_longest:
            remaining = self._lengths.remaining(sequence.num_output_tokens, remaining)
        elsewhere = num_cached_tokens + sequence.budget.num_dropped_tokens  # or nowhere
        shared, remaining = elsewhere // self._page_tokens, max(0, remaining - 1)
        num_tokens = len(sequence.tokens) + sequence.in_flight.num_tokens
        if sequence.speculates and self._num_branching:
            num_tokens = min(num_tokens + self._num_branching, self._max_context - remaining)
        return Demand(
            num_tokens,
            remaining,
            tuple(shared if window is None else 0 for window in self._windows),
        )


class LengthStatistics:
    """Output lengths of the newest `size` finished requests, and what they say of running ones."""

    def __init__(self, size: int = 256):
        self._newest: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        self._sums = [0]  # entry i: of the i longest

    def record(self, num_output_tokens: int) -> None:
        """Adds a finished request, and forgets the oldest where there are more than `size`."""
        self._newest.append(num_output_tokens)
        ordered = sorted(self._newest)
        self._sorted, self._sums = ordered, [0, *itertools.accumulate(reversed(ordered))]

    def remaining(self, num_output_tokens: int, limit: int) -> int:
        """Expected tokens still to come of a request that has generated `num_output_tokens` and
        may generate `limit` more: the mean of how many more longer requests generated, rounded up;
        `limit` where none was longer.
        """
        num_longer = len(self._sorted) - bisect.bisect_right(self._sorted, num_output_tokens)
        if not num_longer:
            return limit
        return min(limit, -(-self._sums[num_longer] // num_longer) - num_output_tokens)


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a sequence holds now and will hold.

    Attributes:
        num_tokens: tokens in the cache once this step has run.
        remaining: tokens it grows by afterwards, one a step; 0 or more. A request's last token is
            never fed: one that generates n more, this step's included, grows by n - 1.
        num_shared_pages: of each group, the leading pages that are counted elsewhere, or given up;
            empty for none.
    """

    num_tokens: int
    remaining: int
    num_shared_pages: tuple[int, ...] = ()


def peak_pages(
    demands: Items[Demand], windows: Items[int | None], page_tokens: int
) -> tuple[int, ...]:
    """The most pages that these sequences hold together, a group, in this step or a coming one:
    each grows by a token a step and frees its pages when its remaining tokens are done.

    A prompt is taken to be in the cache whole from this step on. Two things are not counted: a
    sequence whose prompt takes k more steps ends k steps later (with `remaining` raised by k the
    peak is a bound again), and a group with a window holds pages for all tokens of a prompt that
    are fed at once. `windows` are the `sliding` ones of each group's `CacheSpec`.
    """
    if not demands:
        return (0,) * len(windows)
    num_tokens = np.array([demand.num_tokens for demand in demands])
    remaining = np.array([demand.remaining for demand in demands])
    peaks = []
    for group, window in enumerate(windows):
        shared = [d.num_shared_pages[group] if d.num_shared_pages else 0 for d in demands]
        peaks.append(_peak(num_tokens, remaining, np.array(shared), window, page_tokens))
    return tuple(peaks)


def _peak(
    num_tokens: np.ndarray,
    remaining: np.ndarray,
    num_shared_pages: np.ndarray,
    window: int | None,
    page: int,
) -> int:
    """The largest sum over this step and those to come of what the sequences hold in one group.

    Each sequence allocates a page every `page` steps, and frees one as often once its window has
    moved past the first page of its own. Such a series is two marks: one at its first step, one
    behind its last. In a table whose rows are `page` steps, marks summed down the columns are the
    changes of each step, and changes summed over the steps are the pages held. So the work grows
    with sequences plus steps, not with their product.
    """
    last = int(remaining.max())
    table = np.zeros((last // page + 2, page), np.int64)
    steps = table.reshape(-1)  # reaches beyond `last`: its end takes all that comes later
    end = steps.size - 1

    def change_every_page(first: np.ndarray, by: int) -> None:
        behind = first + np.maximum(0, -(-(remaining + 1 - first) // page)) * page
        np.add.at(steps, np.minimum(first, end), by)
        np.add.at(steps, np.minimum(behind, end), -by)

    def num_pages(num_tokens: np.ndarray) -> np.ndarray:
        """Pages from the first that is neither shared nor out of the newest token's sight."""
        gone = num_shared_pages
        if window is not None:
            gone = np.maximum(gone, (num_tokens - window) // page)
        return -(-num_tokens // page) - gone

    change_every_page(1 + -num_tokens % page, +1)
    if window is not None:
        past = window - num_tokens  # the step at which the window begins to move
        first_freed = past + (num_shared_pages + 1) * page
        change_every_page(np.maximum(first_freed, 1 + (past - 1) % page), -1)
    np.cumsum(table, axis=0, out=table)
    steps[0] += num_pages(num_tokens).sum()
    np.subtract.at(steps, np.minimum(remaining + 1, end), num_pages(num_tokens + remaining))
    return int(np.cumsum(steps, out=steps)[: last + 1].max())
