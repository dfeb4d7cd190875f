"""One of several servers of a model: the HTTP application without a socket."""

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Message

from inference.server.client.start import start
from inference.server.replicas.forwarded import HttpRequest, HttpStart, Parts
from inference.server.service import Service
from inference.server.web.access import CLIENT
from inference.server.web.app import routed
from inference.server.web.observed import Observed

_LEAVE_S = 1.0  # for what served a client that has left to end by itself


class Unhealthy(Exception):
    """The engine is not heard of; another replica should take this one's place."""


class Replica:
    """A service, its engine, and the application that draws on it. All in one event loop."""

    def __init__(self, service: Service, id: str):
        """`id`: names it among the others."""
        self._service = service
        self._app = Observed(routed(service), service.metrics.answered)
        self._id = id
        self._engine: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the engine; returns once requests are served.

        Raises:
            EngineFailed: it could not be started.
        """
        self._engine = await start(self._service.client)

    async def answer(self, request: HttpRequest) -> Parts:
        """The answer to a request; whoever stops reading ends it."""
        parts: asyncio.Queue[Message | None] = asyncio.Queue()  # bounded by the tokens asked for
        has_left = asyncio.Event()
        given = _once({"type": "http.request", "body": request.body, "more_body": False})

        async def receive() -> Message:
            for message in given:
                return message
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            parts.put_nowait(message)

        app = asyncio.ensure_future(self._app(_scope(request), receive, send))
        app.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            head: Message | None = None
            while (message := await parts.get()) is not None:
                if message["type"] == "http.response.start":
                    head = message
                    continue
                body = message.get("body", b"")
                if head is not None:
                    yield HttpStart(self._id, head["status"], tuple(head["headers"]), body)
                    head = None
                elif body:
                    yield body
            app.result()
        finally:
            has_left.set()
            await asyncio.wait([app], timeout=_LEAVE_S)
            app.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await app

    def check(self) -> None:
        """Whether the engine is alive, or being started again.

        Raises:
            Unhealthy: it is not.
        """
        if not self._service.is_alive:
            raise Unhealthy(f"the engine is {self._service.client.state.value}, and not heard of")

    def metrics(self) -> tuple[str, str]:
        """Its id, and its metrics as text."""
        return self._id, self._service.metrics.text().decode()

    async def close(self) -> None:
        """Ends the engine, and what goes with it."""
        self._service.is_draining = True
        await self._service.client.stop()
        if self._engine is not None:
            await asyncio.wait([self._engine])
        self._service.close()


def _once(message: Message) -> Iterator[Message]:
    yield message


def _scope(request: HttpRequest) -> dict:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "headers": list(request.headers),
        "client": None,
        "server": None,
        CLIENT: request.client,
    }
