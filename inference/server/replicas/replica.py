"""One of several servers of a model: the HTTP application without a socket."""

import asyncio
import os
from pathlib import Path

from inference.server.client.start import start
from inference.server.failures import request_id
from inference.server.replicas.forwarded import HttpRequest
from inference.server.service import Service
from inference.server.web import asgi_client
from inference.server.web.access import REQUEST_ID
from inference.server.web.app import routed
from inference.server.web.asgi_client import Parts
from inference.server.web.observed import RequestObserver


class Unhealthy(Exception):
    """The engine is dead; another replica should replace this one."""


class Replica:
    """A service with its engine and application, in one event loop."""

    def __init__(self, service: Service, id: str):
        self._service = service
        self._app = RequestObserver(routed(service), service.metrics.answered)
        self._id = id
        self._engine: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the engine and waits until it is ready; raises `EngineFailed`."""
        self._engine = await start(self._service.client)

    def answer(self, request: HttpRequest) -> Parts:
        """Yields the answer to a request; closing the generator aborts the request."""
        request_id.set(dict(request.headers).get(REQUEST_ID.encode(), b"").decode("latin-1"))
        return asgi_client.answer(
            self._app, request.method, request.path, request.headers, request.body, request.query,
            request.client, self._id,
        )  # fmt: skip

    def check(self) -> None:
        """Raises `Unhealthy` unless the engine is alive or being restarted."""
        if not self._service.is_alive:
            raise Unhealthy(f"the engine is {self._service.client.state.value}, and not heard of")

    def metrics(self) -> tuple[str, str]:
        return self._id, self._service.metrics.text().decode()

    async def close(self) -> None:
        self._service.is_draining = True
        await self._service.client.stop()
        if self._engine is not None:
            await asyncio.wait([self._engine])
        self._service.close()


def take_cores(rank: int, num_replicas: int) -> None:
    """Binds this process, and the engine that it starts, to its share of the cores; to all if there
    are fewer cores than replicas.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if share := len(cores) // num_replicas:
        start = rank % num_replicas * share
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[start : start + share])
