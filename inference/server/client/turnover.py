"""How long a request would wait for a slot, as fast as those that run get on."""

import time
from collections.abc import Callable

_WINDOW_S, _WINDOW_DONE = 30.0, 8  # whichever is longer
_MIN_DONE = 4  # fewer tell nothing yet


class Turnover:
    """Sequences that get done while all slots are taken: as many can begin.

    Each token is its share of the most tokens that its sequence may have, and one that ends early
    the rest of it, so that a speed is known before a first sequence has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds."""
        self._clock = clock
        self._since: float | None = None
        # In the latest seconds in which all slots were taken, and since the last look: sequences
        # done; of those that tell their tokens as they come the same, and what of it was told.
        self._seconds = self._done = self._telling_done = self._told = 0.0
        self._new = (0.0, 0.0, 0.0)

    def add(self, num_done: float, num_told: float | None = None) -> None:
        """So many sequences got done, or parts of them, and so much of it by tokens; None: they
        tell none before they end.
        """
        done, telling_done, told = self._new
        if num_told is not None:
            telling_done, told = telling_done + num_done, told + num_told
        self._new = done + num_done, telling_done, told

    def look(self, is_full: bool) -> None:
        """What was added counts if all slots were taken until now; `is_full`: they are from here
        on.
        """
        now = self._clock()
        if self._since is not None:
            done, telling_done, told = self._new
            self._seconds += now - self._since
            self._done += done
            self._telling_done += telling_done
            self._told += told
            by_time = _WINDOW_S / max(self._seconds, 1e-9)
            kept = min(1.0, max(by_time, _WINDOW_DONE / max(self._done, 1e-9)))
            self._seconds, self._done = kept * self._seconds, kept * self._done
            self._telling_done, self._told = kept * self._telling_done, kept * self._told
        self._new = (0.0, 0.0, 0.0)
        self._since = now if is_full else None

    def left(self, progress: float) -> float:
        """What is left of a sequence of average length that has told this share of the most tokens
        that it may have.
        """
        return max(0.0, 1 - progress * self._telling_done / max(self._told, 1e-9))

    def wait_s(self, num_ahead: float) -> float:
        """Seconds until so many are done; 0 where nothing is known."""
        if num_ahead <= 0 or self._done < _MIN_DONE:
            return 0.0
        silent = 0.0 if self._since is None else self._clock() - self._since
        return num_ahead * (self._seconds + silent) / self._done
