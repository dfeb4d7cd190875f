"""Sends requests to an ASGI application without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable

from starlette.types import ASGIApp, Message

from inference.server.web.access import CLIENT

_LEAVE_S = 1.0  # for the application to end by itself after a disconnect


async def messages(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    query: bytes = b"",
    client: str = "",
) -> AsyncGenerator[Message, None]:
    """Yields the messages of an answer as they come; closing the generator disconnects.

    `client`: name of the client's key.
    """
    parts: asyncio.Queue[Message | None] = asyncio.Queue()  # `max_tokens` bounds its length
    has_left = asyncio.Event()
    request_messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode(), "query_string": query,
        "root_path": "", "headers": list(headers), "client": None, "server": None, CLIENT: client,
    }  # fmt: skip

    async def receive() -> Message:
        if request_messages:
            return request_messages.pop()
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
