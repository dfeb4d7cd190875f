"""What a gateway and the replicas behind it exchange: HTTP requests, and answers as they come."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

Headers = tuple[tuple[bytes, bytes], ...]


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """A request whose body is whole.

    Attributes:
        client: who asks, by the key.
        prefixes: digests of longer and longer beginnings of its prompt.
        avoid: ids of replicas that have refused it.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str = ""
    prefixes: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class HttpStart:
    """The head of an answer, with the first bytes of its body: of a stream, the first event.

    Attributes:
        replica: id of the one that answers.
    """

    replica: str
    status: int
    headers: Headers
    body: bytes


Parts = AsyncGenerator[HttpStart | bytes, None]  # an `HttpStart`, then bytes of the body


class ReplicaLost(Exception):
    """The replica that had a request has gone; nothing more comes from it."""


class Replicas(Protocol):
    """Several servers of one model."""

    def answer(self, request: HttpRequest) -> Parts:
        """The answer of one of them; whoever stops reading ends the request.

        Raises:
            ReplicaLost: it has gone.
        """

    async def num_ready(self) -> int:
        """How many serve requests."""

    async def metrics(self) -> dict[str, str]:
        """Each one's metrics as text, by its id; without those that do not answer."""
