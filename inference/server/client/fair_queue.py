"""Which request goes to the engine next: those of a higher priority first, and among these that of
whoever was served least.

A virtual token counter (Sheng et al. 2024, https://arxiv.org/abs/2401.00588): each client's grows
by the tokens that it is served, those of prompts once and those of answers twice. One that comes
back begins where the others are: time without requests is not saved up.
"""

import bisect
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator

from inference.server.client.pending_request import PendingRequest

_PROMPT_WEIGHT, _ANSWER_WEIGHT = 1, 2


class FairQueue:
    """Requests that wait, by client and in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[PendingRequest]] = {}  # of each client, the first to go first
        self._served: defaultdict[str, int] = defaultdict(int)
        self._least = 0  # what the client had been served whose request went last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[PendingRequest]:
        return itertools.chain.from_iterable(self._waiting.values())

    def __contains__(self, asked: PendingRequest) -> bool:
        return asked in self._waiting.get(asked.client, ())

    @property
    def oldest_s(self) -> float:
        """Seconds that the one has waited that came first; 0 where none waits."""
        now = time.monotonic()
        return max((now - asked.since for asked in self), default=0.0)

    def add(self, asked: PendingRequest) -> None:
        """A request that has to wait."""
        if asked.client not in self._waiting:
            self._waiting[asked.client] = []
            self._served[asked.client] = max(self._served[asked.client], self._least)
        bisect.insort(self._waiting[asked.client], asked, key=_rank)

    def pop(self) -> PendingRequest:
        """The next."""
        client = min(self._waiting, key=self._turn)
        self._least = max(self._least, self._served[client])
        asked = self._waiting[client][0]
        self._served[client] += _PROMPT_WEIGHT * asked.num_prompt_tokens
        self.discard(asked)
        return asked

    def discard(self, asked: PendingRequest) -> None:
        """One that does not wait any more."""
        own = self._waiting[asked.client]
        own.remove(asked)
        if not own:
            del self._waiting[asked.client]

    def served(self, client: str, num_tokens: int) -> None:
        """So many tokens of an answer came."""
        self._served[client] += _ANSWER_WEIGHT * num_tokens

    def num_ahead(self, client: str, priority: int) -> int:
        """Requests that would go before one that came now, where each takes as long."""
        own = self._waiting.get(client, [])
        turns = 1 + len(own) - _num_above(own, priority)
        found = 0
        for name, waiting in self._waiting.items():
            num_above = _num_above(waiting, priority)
            num_equal = bisect.bisect_right(waiting, -priority, key=_rank) - num_above
            found += num_above + (num_equal if name == client else min(num_equal, turns))
        return found

    def _turn(self, client: str) -> tuple[int, int]:
        return _rank(self._waiting[client][0]), self._served[client]


def _rank(asked: PendingRequest) -> int:
    return -asked.priority


def _num_above(waiting: list[PendingRequest], priority: int) -> int:
    """Of a higher priority than this."""
    return bisect.bisect_left(waiting, -priority, key=_rank)
