"""Adds up the counters of successive engines: a restarted one begins at 0."""

import itertools
from collections.abc import Sequence

import msgspec

from inference.server.frames import Heartbeat


class EngineTotals:
    """Adds the counts of engines that have ended to those of the one that runs.

    Attributes:
        heartbeat: the latest, with the counts of all engines.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self._before = Heartbeat()  # counts of the engines that ended

    def take(self, heartbeat: Heartbeat) -> None:
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
        """Keeps the counts of an engine that has ended."""
        last = self.heartbeat
        self.heartbeat = self._before = Heartbeat(
            counters=last.counters,
            read_bandwidth=last.read_bandwidth,
            iteration_tokens=last.iteration_tokens,
            accepted_per_position=last.accepted_per_position,
        )


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]
