"""Limits of connections that uvicorn lacks: on large, slow and invalid heads, on clients that
do not read, and on clients that still send after the answer.
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from inference.server.endpoints.anthropic import errors
from inference.server.protocol.errors import ApiError
from inference.server.service import Limits

_UPGRADE = (b"upgrade", b"http2-settings")  # headers of a request for another protocol
_NO_HTTP = ApiError(400, "this is not a valid HTTP request")
_LARGE_HEAD = ApiError(431, "the head of the request is too large")
_LATE_HEAD = ApiError(408, "the head of the request did not come in time")
_DROPPED = 16  # times the largest body: read and dropped after the last answered request

_log = logging.getLogger(__name__)


class _RejectedRequest(Exception):
    """Stops the parser: nothing after this request is served."""

    def __init__(self, error: ApiError):
        self.error = error


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    Requests for another protocol (`Upgrade`) are answered over HTTP/1.1, as RFC 9110 permits. Data
    after a rejected request is read and dropped, up to a limit: unread data makes the system send a
    reset, which would overtake the answer.
    """

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        stalled: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ):
        """`stalled`: called before a client that does not read is disconnected."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._stalled = stalled
        self.url = b""  # of the last request
        self._in_head = True
        self._head_bytes = 0  # of a head or of trailers, since the last that was anything else
        self._trailer_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None  # sent after the answers to earlier requests
        self._is_closing = False  # nothing more is written
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Parses data of the client, or drops it after a rejected request."""
        if self._is_closing or self._refusal is not None:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._parse(data)
        if self._is_closing or self._refusal is not None:
            return
        if max(self._head_bytes, self._trailer_bytes) > self._limits.head_bytes:
            self._refuse(_LARGE_HEAD)
        elif self._is_answered and self._head_timer is None:
            # The rest of a body, or empty lines: these keep the connection only for a short time.
            self._within_head_s(self.transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; trailers after a body are counted and dropped."""
        if self._in_head:
            super().on_header(name, value)
        else:
            self._trailer_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise _RejectedRequest(ApiError(405, "this server is no proxy"))
        if self.parser.should_upgrade():
            return  # it is parsed once more
        self._cancel_head_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes:
            raise _RejectedRequest(_LARGE_HEAD)
        self._in_head, self._head_bytes, self._trailer_bytes = False, 0, 0
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request, unless its head has to be parsed again without `Upgrade`."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Ends an answer; then rejects the request after it, if that is due."""
        if self._is_closing:
            self.pipeline.clear()
        super().on_response_complete()
        if self._refusal is not None and not self._is_in_between:
            self._answer_refusal(self._refusal)

    def close_gently(self) -> None:
        """Ends writing, and leaves the client time to read and to finish sending."""
        if self._is_closing or self.transport.is_closing():
            return
        self._is_closing = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._within_head_s(self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._limits.stall_s, self._disconnect)

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def _disconnect(self) -> None:
        self._stalled()
        self.transport.abort()

    @property
    def _is_answered(self) -> bool:
        """Whether all requests are answered, and none has begun."""
        return not self._in_head and self.cycle is not None and self.cycle.response_complete

    @property
    def _is_in_between(self) -> bool:
        """Whether data written now would come before the end of an earlier request's answer."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        is_whole = self._in_head or (is_open and not cycle.more_body)  # and its answer to come
        return bool(self.pipeline) or (is_open and (is_whole or cycle.response_started))

    def _await_head(self) -> None:
        self._within_head_s(functools.partial(self._refuse, _LATE_HEAD))

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

    def _parse(self, data: bytes) -> None:
        unread = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(unread)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    unread = unread[upgrade.args[0] :]
                    self._parse_without_upgrade()
        except httptools.HttpParserError as error:
            why = error.__context__
            self._refuse(why.error if isinstance(why, _RejectedRequest) else _NO_HTTP)

    def _parse_without_upgrade(self) -> None:
        """Parses the head of a request again, without its request for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE)
            if name not in _UPGRADE and (value or name != b"connection"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > _DROPPED * self._limits.body_bytes:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Sends an error after the answers to earlier requests, and closes the connection."""
        if self._is_closing or self.transport.is_closing() or self._refusal is not None:
            return
        if error.status != 408:  # browsers keep unused connections open: no fault
            peer = "a client" if self.client is None else "{}:{}".format(*self.client)
            _log.warning("%s: %d, %s", peer, error.status, error.message)
        self._cancel_head_timer()
        self._refusal = error
        if not self._is_in_between:
            self._answer_refusal(error)

    def _answer_refusal(self, error: ApiError) -> None:
        if self._is_closing:
            return
        if self.cycle is not None:  # a request with an invalid body gets no other answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        path = self.url.partition(b"?")[0].decode("latin-1")
        body = errors.body(error) if errors.has_path(path) else error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.close_gently()


class _AnswerTransport:
    """The transport of one answer; closes the connection gently after the last."""

    def __init__(self, connection: GuardedProtocol):
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.close_gently()
