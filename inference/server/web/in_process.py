"""The application without a port, for requests of this process."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from inference.http_client.connections import Answer, Unanswered
from inference.server.client.start import start
from inference.server.failures import request_id
from inference.server.service import Service
from inference.server.web import asgi_client
from inference.server.web.access import REQUEST_ID
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
        return await _posted(self._app, path, body)


class Background:
    """Posts requests of a batch to an application without access control."""

    def __init__(self, app: ASGIApp, client: str, limit_s: float):
        """`client`: name of the batch's key; `limit_s`: seconds for an answer."""
        self._app = app
        self._client = client
        self._limit_s = limit_s

    async def post(self, path: str, body: bytes) -> Answer:
        """Posts JSON and returns the answer; raises Unanswered if there is none."""
        id = secrets.token_hex(16)
        request_id.set(id)
        answer = await _posted(self._app, path, body, self._client, self._limit_s)
        return answer._replace(headers=answer.headers | {REQUEST_ID: id})


async def _posted(
    app: ASGIApp, path: str, body: bytes, client: str = "", background_s: float | None = None
) -> Answer:
    headers = {
        b"host": b"localhost",
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
    }
    generator = asgi_client.answer(
        app, "POST", path, headers.items(), body, client=client, background_s=background_s
    )
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
