"""How long a request would wait, as fast as others end."""

import time
from collections.abc import Callable

_WINDOW_S = 30.0
_MIN_ENDS = 4  # which tell nothing yet


class Pace:
    """Sequences that end while others wait: as many can begin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds."""
        self._clock = clock
        self._num_ended = self._seconds = 0.0  # in the latest seconds in which others waited
        self._since: float | None = None

    def note(self, num_ended: int, others_wait: bool) -> None:
        """So many ended now, and others wait from here on."""
        now = self._clock()
        if self._since is not None:
            self._num_ended += num_ended
            self._seconds += now - self._since
            kept = min(1.0, _WINDOW_S / max(self._seconds, 1e-9))
            self._num_ended, self._seconds = kept * self._num_ended, kept * self._seconds
        self._since = now if others_wait else None

    def wait_s(self, num_ahead: float) -> float:
        """Seconds until so many have ended; 0 where nothing is known."""
        if num_ahead <= 0 or self._num_ended < _MIN_ENDS:
            return 0.0
        silent = 0.0 if self._since is None else self._clock() - self._since
        return num_ahead * (self._seconds + silent) / self._num_ended
