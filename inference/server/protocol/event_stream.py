"""Server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Events = AsyncGenerator[bytes, None]
Result = TypeVar("Result")


async def primed(events: Events) -> Events:
    """Waits for the first event and returns all events. Errors before it are raised here, while the
    answer can still have an error status.
    """
    first = await anext(events)

    async def again() -> Events:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    return again()


class EventStream(Response):
    """Sends events until they end, and closes them if the client disconnects. After `idle_s`
    without an event, `keep_alive` keeps the connection open.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        idle_s: float,
        failed: Callable[[Exception], bytes],
        on_leave: Callable[[], None] = lambda: None,
        keep_alive: bytes = KEEP_ALIVE,
    ):
        """`failed`: returns the last event of a stream that fails; `on_leave`: called if the client
        leaves before the end; `keep_alive`: a comment, or an event without effect.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._idle_s = idle_s
        self._failed = failed
        self._on_leave = on_leave
        self._keep_alive = keep_alive
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def put(data: bytes) -> None:
            self._sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            pump = await unless_gone(receive, self._pump(put), self._keep(put))
        finally:
            await self._events.aclose()
        if pump is None:
            self._on_leave()
            return
        pump.result()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, put: Callable) -> None:
        try:
            async for event in self._events:
                await put(event)
        except Exception as error:
            await put(self._failed(error) + DONE)

    async def _keep(self, put: Callable) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._idle_s - time.monotonic()))
            if time.monotonic() - self._sent_at >= self._idle_s:
                await put(self._keep_alive)


async def unless_gone(
    receive: Receive, work: Awaitable[Result], *others: Awaitable[None]
) -> "asyncio.Future[Result] | None":
    """Runs work beside others until it ends or the client disconnects, and ends all of them.

    Returns:
        The ended task of the work; None if the client left first. The request's body has been
        read before.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = [working, *map(asyncio.ensure_future, (*others, gone()))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
