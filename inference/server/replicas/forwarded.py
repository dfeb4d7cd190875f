"""Requests and answers between a gateway and its replicas."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from inference.server.web.asgi_client import Headers, Parts


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """A request with its whole body.

    Attributes:
        client: name of the client's key.
        prefixes: digests of longer and longer beginnings of the prompt.
        avoid: ids of replicas that have rejected it.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str = ""
    prefixes: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()


class ReplicaLost(Exception):
    """The replica that had a request has ended."""


class Replicas(Protocol):
    """Several servers of one model."""

    def answer(self, request: HttpRequest) -> Parts:
        """Yields the answer of one replica; closing the generator aborts the request.

        Raises:
            ReplicaLost: the replica has ended.
        """

    async def num_ready(self) -> int:
        """Number of replicas that serve requests."""

    async def metrics(self) -> dict[str, str]:
        """Id -> metrics as text, of the replicas that answer."""
