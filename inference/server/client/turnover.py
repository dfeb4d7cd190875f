"""How long a request would wait for a slot, as fast as those that run get on."""

import time
from collections.abc import Callable

_WINDOW_S = 30.0
_MIN_DONE = 4  # fewer tell nothing yet


class Turnover:
    """Sequences that get done while all slots are taken: as many can begin.

    Each token is its share of the longest that its sequence can get, and one that ends early the
    rest of it, so that a speed is known long before a first sequence has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds."""
        self._clock = clock
        # In the latest seconds in which all slots were taken.
        self._num_told = self._num_done = self._seconds = 0.0
        self._since: float | None = None

    def note(self, num_told: float, num_done: float, is_full: bool) -> None:
        """What came since the last call.

        Args:
            num_told: sequences, in shares of the longest that they can get: their tokens.
            num_done: these, and the rest of those that ended.
            is_full: all slots are taken from here on.
        """
        now = self._clock()
        if self._since is not None:
            seconds = self._seconds + now - self._since
            kept = min(1.0, _WINDOW_S / max(seconds, 1e-9))
            self._num_told = kept * (self._num_told + num_told)
            self._num_done = kept * (self._num_done + num_done)
            self._seconds = kept * seconds
        self._since = now if is_full else None

    def left(self, progress: float) -> float:
        """Of a sequence, as long as sequences get, that has told this share of the longest."""
        return max(0.0, 1 - progress * self._num_done / max(self._num_told, 1e-9))

    def wait_s(self, num_ahead: float) -> float:
        """Seconds until so many are done; 0 where nothing is known."""
        if num_ahead <= 0 or self._num_done < _MIN_DONE:
            return 0.0
        silent = 0.0 if self._since is None else self._clock() - self._since
        return num_ahead * (self._seconds + silent) / self._num_done
