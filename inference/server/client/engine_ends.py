"""How often engines ended lately, and whether a request explains it."""

import time
from collections import deque

_WITHIN_S = 600.0


class EngineEnds:
    """The latest ends of engines. Those that a failed request caused count until an engine answers
    other requests.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self._explained: deque[float] = deque()  # that a failed request caused
        self._is_unexplained = False  # no request explains the latest end: they are tried alone

    def __len__(self) -> int:
        return len(self._ends) + len(self._explained)

    def add(self) -> None:
        """Counts an end, and drops those that are long ago."""
        now = time.monotonic()
        self._ends.append(now)
        for ends in (self._ends, self._explained):
            while ends and ends[0] < now - _WITHIN_S:
                ends.popleft()

    def suspect_any(self) -> None:
        """Notes that no request was tried alone when the latest engine ended."""
        self._is_unexplained = True

    def explain(self, num_blamed: int) -> None:
        """Notes that a request failed, which so many of the latest engines ended with."""
        for _ in range(min(num_blamed + self._is_unexplained, len(self._ends))):
            self._explained.append(self._ends.pop())
        self._is_unexplained = False

    def answered(self) -> None:
        """Notes that an engine answers requests."""
        self._explained.clear()
