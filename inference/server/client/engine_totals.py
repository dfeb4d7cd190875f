"""What engines have counted, one after the other: a new one begins with nothing."""

import itertools
from collections.abc import Sequence

import msgspec

from inference.server.frames import Heartbeat


class EngineTotals:
    """Adds the counts of engines that have ended to those of the one that runs.

    Attributes:
        heartbeat: the latest, where counts are those of all.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self._before = Heartbeat()  # what those that ended have counted

    def take(self, heartbeat: Heartbeat) -> None:
        """The engine that runs says this."""
        before = self._before
        counters = dict(before.counters)
        for name, count in heartbeat.counters.items():
            counters[name] = counters.get(name, 0) + count
        self.heartbeat = msgspec.structs.replace(
            heartbeat,
            counters=counters,
            iteration_tokens=_sums(before.iteration_tokens, heartbeat.iteration_tokens),
            accepted_per_position=_sums(
                before.accepted_per_position, heartbeat.accepted_per_position
            ),
        )

    def end(self) -> None:
        """It has ended: it holds nothing."""
        last = self.heartbeat
        self.heartbeat = self._before = Heartbeat(
            counters=last.counters,
            read_bandwidth=last.read_bandwidth,
            iteration_tokens=last.iteration_tokens,
            accepted_per_position=last.accepted_per_position,
        )


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]
