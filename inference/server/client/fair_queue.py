"""Which request goes to the engine next: that of whoever was served least, and of its own the one
of the lowest `priority` value. What a client says of its requests is no reason for others to wait.

A virtual token counter (Sheng et al. 2024, https://arxiv.org/abs/2401.00588): each client's grows
by the tokens that it is served, those of prompts once and those of answers twice. One that comes
back begins where those are that wait: time without requests is not saved up.
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
            least = min((self._served[name] for name in self._waiting), default=self._least)
            self._waiting[asked.client] = []
            self._served[asked.client] = max(self._served[asked.client], least)
        bisect.insort(self._waiting[asked.client], asked, key=_rank)

    def pop(self) -> PendingRequest:
        """The next."""
        client = min(self._waiting, key=self._served.__getitem__)
        self._least = self._served[client]
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
        num_own = bisect.bisect_right(own, priority, key=_rank)
        others = (len(each) for name, each in self._waiting.items() if name != client)
        return num_own + sum(min(num, num_own + 1) for num in others)


def _rank(asked: PendingRequest) -> int:
    return asked.priority
