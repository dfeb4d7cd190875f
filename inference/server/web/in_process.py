"""The application without a port: its answers to what this process asks."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from starlette.types import ASGIApp, Message

from inference.http_client.connections import Answer, Unanswered
from inference.server.client.start import start
from inference.server.service import Service
from inference.server.web.access import CLIENT
from inference.server.web.app import application

_LEAVE_S = 1.0  # for what served a client that has left to end by itself


class InProcess:
    """Posts to an application as a client would over HTTP."""

    def __init__(self, app: ASGIApp, engine: "asyncio.Task[None]"):
        """`engine`: what keeps the engine that answers."""
        self._app = app
        self._engine = engine

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer to JSON that is posted.

        Raises:
            EngineFailed: there is no engine any more.
            Unanswered: there is no answer.
        """
        if self._engine.done():
            self._engine.result()
        headers = {
            b"host": b"localhost",
            b"content-type": b"application/json",
            b"content-length": str(len(body)).encode(),
        }
        start: Message = {}
        parts: list[bytes] = []
        told = messages(self._app, "POST", path, headers.items(), body)
        async with contextlib.aclosing(told):
            async for message in told:
                if message["type"] == "http.response.start":
                    start = message
                else:
                    parts.append(message.get("body", b""))
        if not start:
            raise Unanswered("the application has no answer")
        found = {name.decode("latin-1").lower(): value.decode("latin-1")
                 for name, value in start["headers"]}  # fmt: skip
        return Answer(start["status"], found, b"".join(parts))


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[InProcess]:
    """The application of a service whose engine is ready, until the end of the context.

    Raises:
        EngineFailed: the engine could not be started.
    """
    try:
        engine = await start(service.client)
        try:
            yield InProcess(application(service), engine)
        finally:
            await service.client.stop()
            await asyncio.gather(engine, return_exceptions=True)
    finally:
        service.close()


async def messages(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    query: bytes = b"",
    client: str = "",
) -> AsyncGenerator[Message, None]:
    """What it answers to a request, as it comes; whoever stops reading has disconnected.

    `client`: who asks, by the key.
    """
    parts: asyncio.Queue[Message | None] = asyncio.Queue()  # bounded by the tokens asked for
    has_left = asyncio.Event()
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode(), "query_string": query,
        "root_path": "", "headers": list(headers), "client": None, "server": None, CLIENT: client,
    }  # fmt: skip

    async def receive() -> Message:
        if given:
            return given.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        parts.put_nowait(message)

    async def answer() -> None:
        await app(scope, receive, send)

    answering = asyncio.create_task(answer())
    answering.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (message := await parts.get()) is not None:
            yield message
        answering.result()
    finally:
        has_left.set()
        await asyncio.wait([answering], timeout=_LEAVE_S)
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await answering
