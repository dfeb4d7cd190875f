"""What stands before several replicas: passes requests on, and tries another where one is lost."""

import asyncio
import dataclasses
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from inference.server import metrics
from inference.server.client.generation import Deadline
from inference.server.endpoints.answers import as_api_error
from inference.server.endpoints.responses.bodies import Completed, Cut, Failed
from inference.server.failures import log_failure, request_id
from inference.server.protocol import caller
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError, unavailable
from inference.server.protocol.event_stream import DONE, gone
from inference.server.replicas import affinity
from inference.server.replicas.forwarded import (
    HttpRequest,
    HttpStart,
    ReplicaLost,
    Replicas,
)
from inference.server.replicas.merged_metrics import GatewayMetrics
from inference.server.service import Limits
from inference.server.web import body
from inference.server.web.access import CLIENT, REQUEST_ID

_TRIES = 3  # replicas that a request may be lost with: it may be why
_GRACE_S = 1.0  # a replica that has a request says itself that it was late
_LAST = tuple(  # of the events of a response: they have no other end
    f"event: {kind.__struct_config__.tag}\n".encode() for kind in (Completed, Cut, Failed)
)
_LOST = ApiError(
    500,
    "the replica that generated this answer ended: send the request again",
    code="replica_lost",
)
_KEPT = (  # headers that replicas read
    "accept",
    "content-type",
    "if-none-match",
    "traceparent",
    "tracestate",
)


class Gateway:
    """An ASGI application. A request is passed on to one replica, and to another one as long as its
    client was told nothing. All in one event loop.

    Attributes:
        replicas: None while they are loaded.
        is_draining: requests that are served go on, and new ones are refused.
    """

    def __init__(self, limits: Limits, replicas: Replicas | None = None):
        """`limits`: of requests, as the replicas have them."""
        self.replicas = replicas
        self.is_draining = False
        self._limits = limits
        self._metrics = GatewayMetrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, as ASGI has it."""
        own = {"/health": self._health, "/ready": self._ready, "/metrics": self._show_metrics}
        try:
            if scope["path"] in own:
                response = await own[scope["path"]]()
                await response(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            pass
        except ReplicaLost:
            raise  # in the middle of an answer: the connection is closed, and its client knows
        except Exception as error:
            failure = as_api_error(error)
            log_failure(error, failure)
            answer = Response(failure.body(), failure.status, failure.headers, "application/json")
            await answer(scope, receive, send)

    async def _health(self) -> Response:
        """Of the gateway, which answers; who looks after replicas sees to theirs."""
        status = "draining" if self.is_draining else "loading" if self.replicas is None else "ready"
        return JSONResponse({"status": status})

    async def _ready(self) -> Response:
        num_ready = await self._served_by().num_ready()
        if not num_ready:
            raise unavailable("no replica is ready")
        return JSONResponse({"status": "ready", "replicas": num_ready})

    async def _show_metrics(self) -> Response:
        texts = {} if self.replicas is None else await self.replicas.metrics()
        text = self._metrics.text(texts)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        replicas = self._served_by()
        request = await self._read(scope, receive)
        timeout = Headers(scope=scope).get(caller.TIMEOUT)
        own = Caller.of(request.client, timeout, self._limits.request_s)
        relay = asyncio.ensure_future(self._relay(replicas, request, send, own.limit_s))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait([relay, leaving], return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
        finally:
            for task in (relay, leaving):
                task.cancel()
            await asyncio.gather(relay, leaving, return_exceptions=True)

    def _served_by(self) -> Replicas:
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.replicas is None:
            raise unavailable("the model is being loaded")
        return self.replicas

    async def _read(self, scope: Scope, receive: Receive) -> HttpRequest:
        request, limits = Request(scope, receive), self._limits
        data = b""
        if scope["method"] == "POST":
            data = await body.read(request, limits.body_bytes, limits.body_s)
        headers = tuple((k, v) for k, v in scope["headers"] if k.decode("latin-1") in _KEPT)
        headers += ((REQUEST_ID.encode(), request_id.get().encode()),)
        client = scope.get(CLIENT, "")
        return HttpRequest(
            scope["method"], scope["path"], scope["query_string"], headers, data, client,
            affinity.prefixes(data, client),
        )  # fmt: skip

    async def _relay(
        self, replicas: Replicas, request: HttpRequest, send: Send, limit_s: float
    ) -> None:
        """Tells a client what a replica answers; `limit_s`: seconds until the end of it.

        Raises:
            ApiError: none answers, and nothing was told.
        """
        refused: HttpStart | None = None
        deadline = Deadline(limit_s)
        for _ in range(_TRIES):
            if deadline.left_s <= 0:
                raise as_api_error(deadline.passed())
            answer = _Answer(send)
            try:
                async with (
                    asyncio.timeout_at(deadline.at + _GRACE_S),
                    aclosing(replicas.answer(_until(deadline, request))) as parts,
                ):
                    start = await anext(parts)
                    assert isinstance(start, HttpStart)
                    if start.status == 503 and start.replica not in request.avoid:
                        refused = start  # another may have room, or an engine
                        avoid = request.avoid | {start.replica}
                        request = dataclasses.replace(request, avoid=avoid)
                        continue
                    await answer.begin(start)
                    async for part in parts:
                        assert isinstance(part, bytes)
                        await answer.go_on(part)
                    await answer.end()
                    return
            except TimeoutError:
                if answer.has_begun:
                    await answer.break_off(as_api_error(deadline.passed()))
                    return
                raise unavailable("no replica took the request in time") from None
            except ReplicaLost as error:
                if answer.has_begun:
                    if not answer.is_whole:
                        self._metrics.lost()
                        log_failure(error, _LOST)
                    await answer.break_off(_LOST)
                    return
                self._metrics.retried()
            except Exception as error:
                if not answer.has_begun:
                    raise
                failure = as_api_error(error)
                log_failure(error, failure)
                await answer.break_off(failure)
                return
        if refused is None:
            why = f"{_TRIES} replicas ended while they had this request: it is not tried again"
            raise ApiError(500, why, code="replica_lost", may_retry=False)
        answer = _Answer(send)
        await answer.begin(refused)
        await answer.end()


def _until(deadline: Deadline, request: HttpRequest) -> HttpRequest:
    """It, with the seconds that are left."""
    left = (caller.TIMEOUT.encode(), f"{max(deadline.left_s, 0.001):.3f}".encode())
    return dataclasses.replace(request, headers=(*request.headers, left))


class _Answer:
    """What a client was told so far."""

    def __init__(self, send: Send):
        self._send = send
        self._headers: dict[bytes, bytes] | None = None
        self._num_bytes, self._last = 0, b""

    @property
    def has_begun(self) -> bool:
        """Whether it was told anything."""
        return self._headers is not None

    @property
    def is_whole(self) -> bool:
        """Whether it has all, though nobody has said so."""
        assert self._headers is not None
        length = self._headers.get(b"content-length")
        if length is None:
            return self._last.endswith(DONE) or any(each in self._last for each in _LAST)
        return self._num_bytes == int(length)

    async def begin(self, start: HttpStart) -> None:
        """Its head, and the first of its body."""
        self._headers = dict(start.headers)
        head = {"type": "http.response.start", "status": start.status}
        await self._send(head | {"headers": list(start.headers)})
        await self.go_on(start.body)

    async def go_on(self, part: bytes) -> None:
        """More of its body."""
        self._num_bytes += len(part)
        self._last = part
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def break_off(self, error: ApiError) -> None:
        """Nothing more comes. If something is missing, a stream says so; of another answer the
        connection is closed: then its client knows.

        Raises:
            ReplicaLost: something is missing, and it is no stream.
        """
        if not self.is_whole:
            if self._headers and b"content-length" in self._headers:
                raise ReplicaLost
            await self.go_on(b"data: " + error.body() + b"\n\n" + DONE)
        await self.end()

    async def end(self) -> None:
        """Nothing more comes."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
