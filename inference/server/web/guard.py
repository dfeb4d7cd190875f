"""Connections that end before a request does: heads that are large or slow, and clients that do not
read. uvicorn limits none of these.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from inference.server.protocol.errors import ApiError
from inference.server.service import Limits


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        stalled: Callable[[], None] = lambda: None,
        **named: Any,
    ):
        """`stalled`: called before a client is disconnected that does not read."""
        super().__init__(*args, **named)
        self._limits = limits
        self._stalled = stalled
        self._in_head = True
        self._head_bytes = 0  # of a head or of trailers, since the last that was anything else
        self._trailer_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        """It has gone."""
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """It sent something."""
        self._head_bytes += len(data)
        super().data_received(data)
        if max(self._head_bytes, self._trailer_bytes) > self._limits.head_bytes:
            self._refuse(ApiError(431, "the head of the request is too large"))
        elif self._is_answered and self._head_timer is None:
            # What is left of a body, or empty lines: no reason to keep the connection for long.
            self._within_head_s(self.transport.close)

    def on_message_begin(self) -> None:
        """The head of a request begins."""
        super().on_message_begin()
        self._in_head = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One is whole; those behind a body, which nobody reads, are no headers of the request."""
        if self._in_head:
            super().on_header(name, value)
        else:
            self._trailer_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._cancel_head_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes:
            self._refuse(ApiError(431, "the head of the request is too large"))
            return
        self._in_head, self._head_bytes, self._trailer_bytes = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of it has come."""
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._limits.stall_s, self._disconnect)

    def resume_writing(self) -> None:
        """It does again."""
        self._cancel_stall_timer()
        super().resume_writing()

    def _disconnect(self) -> None:
        self._stalled()
        self.transport.abort()

    @property
    def _is_answered(self) -> bool:
        """Whether no request is open, and none has begun."""
        return not self._in_head and self.cycle is not None and self.cycle.response_complete

    @property
    def _is_in_between(self) -> bool:
        """Whether what is written now would stand before or within the answer to an earlier
        request.
        """
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        return bool(self.pipeline) or (is_open and (self._in_head or cycle.response_started))

    def _await_head(self) -> None:
        late = ApiError(408, "the head of the request did not come in time")
        self._within_head_s(functools.partial(self._refuse, late))

    def _within_head_s(self, late: Callable[[], None]) -> None:
        self._cancel_head_timer()
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._limits.head_s, late)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _refuse(self, error: ApiError) -> None:
        """Says so, where nothing else is being said, and closes the connection."""
        if self.transport.is_closing():
            return
        if self._is_in_between:
            self.transport.abort()
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()
