"""The application without a port, for requests of this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from inference.http_client.connections import Answer, Unanswered
from inference.server.client.start import start
from inference.server.service import Service
from inference.server.web import asgi_client
from inference.server.web.app import application


class InProcess:
    """Posts to an application as a client would over HTTP."""

    def __init__(self, app: ASGIApp, engine: "asyncio.Task[None]"):
        """`engine`: the task that keeps the engine running."""
        self._app = app
        self._engine = engine

    async def post(self, path: str, body: bytes) -> Answer:
        """Posts JSON and returns the answer.

        Raises:
            EngineFailed: the engine has ended.
            Unanswered: there is no answer.
        """
        if self._engine.done():
            self._engine.result()
        headers = {
            b"host": b"localhost",
            b"content-type": b"application/json",
            b"content-length": str(len(body)).encode(),
        }
        generator = asgi_client.answer(self._app, "POST", path, headers.items(), body)
        async with contextlib.aclosing(generator) as parts:
            start = await anext(parts, None)
            if not isinstance(start, asgi_client.HttpStart):
                raise Unanswered("the application has no answer")
            chunks = [part async for part in parts if isinstance(part, bytes)]
        response_headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start.headers
        }
        return Answer(start.status, response_headers, b"".join([start.body, *chunks]))


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[InProcess]:
    """Starts the engine, yields the application, ends the engine; raises `EngineFailed`."""
    try:
        engine = await start(service.client)
        try:
            yield InProcess(application(service), engine)
        finally:
            await service.client.stop()
            await asyncio.gather(engine, return_exceptions=True)
    finally:
        service.close()
