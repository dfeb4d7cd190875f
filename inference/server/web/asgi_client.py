"""Sends requests to an ASGI application without a socket."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterable

from starlette.types import ASGIApp, Message

from inference.server.web.access import BACKGROUND_S, CLIENT

_LEAVE_S = 1.0  # for the application to end by itself after a disconnect


Headers = tuple[tuple[bytes, bytes], ...]


@dataclasses.dataclass(frozen=True)
class HttpStart:
    """The head of an answer, with the first bytes of its body (a stream's first event).

    Attributes:
        replica: id of the replica that answers; "" without replicas.
    """

    replica: str
    status: int
    headers: Headers
    body: bytes


Parts = AsyncGenerator[HttpStart | bytes, None]  # an `HttpStart`, then bytes of the body


async def answer(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    query: bytes = b"",
    client: str = "",
    replica: str = "",
    background_s: float | None = None,
) -> Parts:
    """Yields the parts of an answer as they come; closing the generator disconnects.

    `client`: name of the client's key. `background_s`: the request belongs to a batch, and has so
    many seconds.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()  # `max_tokens` bounds its length
    has_left = asyncio.Event()
    request_messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode(), "query_string": query,
        "root_path": "", "headers": list(headers), "client": None, "server": None, CLIENT: client,
        BACKGROUND_S: background_s,
    }  # fmt: skip

    async def receive() -> Message:
        if request_messages:
            return request_messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        await app(scope, receive, send)

    answering = asyncio.create_task(run())
    answering.add_done_callback(lambda _: messages.put_nowait(None))
    head: Message | None = None
    try:
        while (message := await messages.get()) is not None:
            part = message.get("body", b"")
            if message["type"] == "http.response.start":
                head = message
            elif head is not None:
                yield HttpStart(replica, head["status"], tuple(head["headers"]), part)
                head = None
            elif part:
                yield part
        answering.result()
    finally:
        has_left.set()
        await asyncio.wait([answering], timeout=_LEAVE_S)
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await answering
