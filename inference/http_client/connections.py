"""HTTP/1.1 to one server, with little work for each piece of a stream: a benchmark's client and the
server that it measures may share a processor.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools

from inference.http_client.address import Address

# An answer that is no stream is silent until its end, and servers end one after minutes themselves.
_SILENCE_S = 900.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # seconds, seconds, tries

OnBody = Callable[[bytes], None]


class Unanswered(Exception):
    """There is no answer; says why."""


class _Silent(Unanswered):
    """Nothing came for too long."""


class NoConnection(Unanswered):
    """The server cannot be reached."""


class Answer(NamedTuple):
    """A server's answer: headers by lower-case name, and the body without what `on_body` took."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connections:
    """Connections to a server; each carries one request at a time, and then the next."""

    def __init__(self, address: Address):
        self.address = address
        self._idle: list[_Connection] = []
        key = "" if address.key is None else f"authorization: Bearer {address.key}\r\n"
        self._head = f"host: {address.name}\r\nuser-agent: ridgeline\r\naccept: */*\r\n{key}"

    async def get(self, path: str) -> Answer:
        """Returns the answer to a GET; raises Unanswered if there is none."""
        return await self.send(self._request("GET", path, ""))

    async def post(self, path: str, body: bytes) -> Answer:
        """Returns the answer to JSON that is posted to a path, from /v1 on; raises as `send`."""
        return await self.send(self.posted(path, body))

    def posted(self, path: str, body: bytes) -> bytes:
        """A request that posts JSON, for `send`."""
        more = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return self._request("POST", path, more) + body

    async def send(self, request: bytes, on_body: OnBody | None = None) -> Answer:
        """Sends a request and returns its answer.

        Args:
            on_body: takes the body of the answer as it comes, where its status is 200.

        Raises:
            Unanswered: there is none, it ended before its end, or nothing came for 15 minutes.
        """
        while True:
            connection, is_new = await self._connection()
            try:
                answer = await connection.exchange(request, on_body)
            except _Silent:
                raise
            except Unanswered:
                # A server closes what was idle for a while, perhaps as this request was sent.
                if is_new or connection.has_begun:
                    raise
                continue
            if connection.may_stay:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> "tuple[_Connection, bool]":
        """One, and whether nothing was sent on it before."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection, False
        address, loop = self.address, asyncio.get_running_loop()
        context = ssl.create_default_context() if address.is_tls else None
        try:
            opening = loop.create_connection(_Connection, address.host, address.port, ssl=context)
            _, connection = await opening
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoConnection(f"no connection to {address.name}: {why}") from None
        return connection, True

    def _request(self, method: str, path: str, more: str) -> bytes:
        return f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._head}{more}\r\n".encode()


class _Connection(asyncio.Protocol):
    """One connection; `has_begun` says that a part of the last answer has come, `may_stay` that a
    further request can be sent.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.is_closed = False
        self.may_stay = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[Answer] | None = None
        self._headers: dict[str, str] = {}
        self._status = 0

    async def exchange(self, request: bytes, on_body: OnBody | None) -> Answer:
        """Sends a request and waits for its answer; cancellation closes the connection."""
        self.has_begun = False
        self._headers = {}
        self._parts: list[bytes] = []
        self._on_body = on_body
        self._status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = self._loop.create_future()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(_SILENCE_S, self._check_silence)
        self._transport.write(request)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiting = None
            self._timer.cancel()

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open: the system asks now and then whether the other side is there."""
        self._transport = cast("asyncio.Transport", transport)
        tcp_socket = transport.get_extra_info("socket")
        tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                tcp_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # which nobody asked for
            self.close()
            return
        self.has_begun = True
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error.__context__ or error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        ends_here = {"content-length", "transfer-encoding"}.isdisjoint(self._headers)
        if self._waiting is not None and self._status and ends_here:
            self.on_message_complete()
        else:
            self._fail("the connection ended before the answer did")

    def _check_silence(self) -> None:
        left_s = self._heard + _SILENCE_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
        else:
            self._fail(f"the server was silent for {_SILENCE_S:g} s", _Silent)

    # --- what the parser calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status != 200 or self._on_body is None:
            self._on_body = self._parts.append

    def on_body(self, data: bytes) -> None:
        assert self._on_body is not None
        self._on_body(data)

    def on_message_complete(self) -> None:
        self.may_stay = not self.is_closed and self._parser.should_keep_alive()  # known here alone
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Answer(self._status, self._headers, b"".join(self._parts)))

    def _fail(self, why: str, kind: type[Unanswered] = Unanswered) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(kind(why))
        self.close()
