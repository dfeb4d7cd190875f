"""Chooses the request that goes to the engine next: of the client that was served the fewest
tokens, the one with the lowest `priority` value. A priority orders one client's requests only.

A virtual token counter (Sheng et al. 2024, https://arxiv.org/abs/2401.00588): each client's grows
by the tokens that it is served, prompt tokens once and answer tokens twice. A client that comes
back starts at the least counter of the waiting clients, so idle time is not saved up.
"""

import bisect
import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Iterator

from inference.server.client.pending_request import PendingRequest

_PROMPT_WEIGHT, _ANSWER_WEIGHT = 1, 2
_PRIORITY = operator.attrgetter("priority")


class FairQueue:
    """Requests that wait, by client (the name of an API key) and in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[PendingRequest]] = {}  # of each client, the first to go first
        self._served: defaultdict[str, int] = defaultdict(int)
        self._least = 0  # counter of the client whose request went last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[PendingRequest]:
        return itertools.chain.from_iterable(self._waiting.values())

    def __contains__(self, request: PendingRequest) -> bool:
        return request in self._waiting.get(request.client, ())

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest request has waited; 0 where none waits."""
        now = time.monotonic()
        return max((now - request.since for request in self), default=0.0)

    def add(self, request: PendingRequest) -> None:
        if request.client not in self._waiting:
            least = min((self._served[name] for name in self._waiting), default=self._least)
            self._waiting[request.client] = []
            self._served[request.client] = max(self._served[request.client], least)
        bisect.insort(self._waiting[request.client], request, key=_PRIORITY)

    def put_back(self, request: PendingRequest) -> None:
        """Adds a request that `pop` returned, before others of its client and priority."""
        queue = self._waiting.setdefault(request.client, [])
        bisect.insort_left(queue, request, key=_PRIORITY)
        self._served[request.client] -= _PROMPT_WEIGHT * request.num_prompt_tokens

    @property
    def next(self) -> PendingRequest:
        """The request that `pop` returns."""
        return self._waiting[min(self._waiting, key=self._served.__getitem__)][0]

    def pop(self) -> PendingRequest:
        request = self.next
        self._least = self._served[request.client]
        self._served[request.client] += _PROMPT_WEIGHT * request.num_prompt_tokens
        self.discard(request)
        return request

    def discard(self, request: PendingRequest) -> None:
        queue = self._waiting[request.client]
        queue.remove(request)
        if not queue:
            del self._waiting[request.client]

    def served(self, client: str, num_tokens: int) -> None:
        """Counts tokens of an answer."""
        self._served[client] += _ANSWER_WEIGHT * num_tokens

    def num_ahead(self, client: str, priority: int) -> int:
        """Requests that would go before a new one, if all take equally long."""
        queue = self._waiting.get(client, [])
        num_of_client = bisect.bisect_right(queue, priority, key=_PRIORITY)
        other_lengths = (len(queued) for name, queued in self._waiting.items() if name != client)
        return num_of_client + sum(min(num, num_of_client + 1) for num in other_lengths)
