"""The application without a port: its answers to what this process asks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message

from inference.http_client.connections import Answer, Unanswered
from inference.server.client.start import start
from inference.server.service import Service
from inference.server.web import asgi_client
from inference.server.web.app import application


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
        told = asgi_client.messages(self._app, "POST", path, headers.items(), body)
        async with contextlib.aclosing(told) as messages:
            async for message in messages:
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
