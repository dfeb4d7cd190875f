"""Estimates how long a request would wait for a slot, from the progress of running sequences."""

import operator
import time
from collections.abc import Callable

_WINDOW_S, _WINDOW_DONE = 30.0, 8  # whichever is longer
_MIN_DONE = 4  # with fewer sequences done, there is no estimate


class Turnover:
    """The rate at which sequences finish while all slots are taken.

    Each token counts as its share of its sequence's `max_tokens`. A sequence that ends early adds
    its remaining share. So a rate is known before the first sequence has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: float | None = None
        # The latest seconds in which all slots were taken; in these, and (`_new`) since the last
        # look: sequences done, those of them that stream their tokens, and the shares streamed.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._new = (0.0, 0.0, 0.0)

    def add(self, num_done: float, num_emitted: float | None = None) -> None:
        """Counts sequences done, or shares of them, and the part that was streamed tokens; None:
        their tokens come only at the end.
        """
        done, streamed_done, emitted = self._new
        if num_emitted is not None:
            streamed_done, emitted = streamed_done + num_done, emitted + num_emitted
        self._new = done + num_done, streamed_done, emitted

    def look(self, is_full: bool) -> None:
        """Counts the shares added since the last look if all slots were taken; `is_full`: they are
        from now on.
        """
        now = self._clock()
        if self._since is not None:
            sums = list(map(operator.add, self._sums, (now - self._since, *self._new)))
            by_time = _WINDOW_S / max(sums[0], 1e-9)
            weight = min(1.0, max(by_time, _WINDOW_DONE / max(sums[1], 1e-9)))
            self._sums = tuple(weight * total for total in sums)
        self._new = (0.0, 0.0, 0.0)
        self._since = now if is_full else None

    def remaining(self, progress: float) -> float:
        """Remaining share of an average sequence that emitted `progress` of its `max_tokens`."""
        _, _, streamed_done, emitted = self._sums
        return max(0.0, 1 - progress * streamed_done / max(emitted, 1e-9))

    def wait_s(self, num_ahead: float) -> float:
        """Seconds until `num_ahead` sequences are done; 0 where nothing is known."""
        seconds, done, *_ = self._sums
        if num_ahead <= 0 or done < _MIN_DONE:
            return 0.0
        silent = 0.0 if self._since is None else self._clock() - self._since
        return num_ahead * (seconds + silent) / done
