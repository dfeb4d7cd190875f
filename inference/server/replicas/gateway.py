"""A gateway before several replicas: forwards requests, and retries if a replica is lost."""

import asyncio
import dataclasses
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from inference.server import metrics
from inference.server.endpoints import stored
from inference.server.endpoints.anthropic import errors
from inference.server.endpoints.anthropic.bodies import MessageStop
from inference.server.endpoints.anthropic.errors import MessagesError
from inference.server.endpoints.responses.bodies import Completed, Cut, Failed
from inference.server.failures import as_api_error, log_failure, request_id
from inference.server.protocol import caller
from inference.server.protocol.caller import Caller, Deadline
from inference.server.protocol.errors import ApiError, unavailable
from inference.server.protocol.event_stream import DONE, unless_gone
from inference.server.replicas import affinity
from inference.server.replicas.forwarded import HttpRequest, ReplicaLost, Replicas
from inference.server.replicas.merged_metrics import GatewayMetrics
from inference.server.service import Limits
from inference.server.web import body
from inference.server.web.access import CLIENT, REQUEST_ID
from inference.server.web.asgi_client import HttpStart

_TRIES = 3  # replicas that may be lost with a request: it may be the cause
_GRACE_S = 1.0  # for a replica to report the missed deadline itself
_LAST = tuple(  # the last events of responses and messages, behind which no `[DONE]` comes
    f"event: {kind.__struct_config__.tag}\n".encode()
    for kind in (Completed, Cut, Failed, MessageStop, MessagesError)
)
_INFILL, _STOP = "/infill", b'"stop":true,'  # its last event has no name and no `[DONE]`, either
_LOST = ApiError(
    500,
    "the replica that generated this answer ended: send the request again",
    code="replica_lost",
)
_NOT_STORED = ApiError(
    501,
    "replicas store no files and batches: one scripts.serve does, and scripts.batch --url sends a "
    "file of requests to this address",
    code="unsupported",
    may_retry=False,
)
_FORWARDED = (  # headers that replicas read
    "accept",
    "content-type",
    "if-none-match",
    "traceparent",
    "tracestate",
)


class Gateway:
    """An ASGI application that forwards each request to a replica, and to another one if that fails
    before the client got anything. Everything runs in one event loop.

    Attributes:
        replicas: None while they are loaded.
        is_draining: running requests continue, new ones are rejected.
    """

    def __init__(self, limits: Limits, replicas: Replicas | None = None):
        """`limits`: of requests, equal to those of the replicas."""
        self.replicas = replicas
        self.is_draining = False
        self._limits = limits
        self._metrics = GatewayMetrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handlers = {"/health": self._health, "/ready": self._ready, "/metrics": self._show_metrics}
        try:
            if scope["path"].startswith(stored.PATHS):
                raise _NOT_STORED
            if scope["path"] in handlers:
                response = await handlers[scope["path"]]()
                await response(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            pass
        except ReplicaLost:
            raise  # in the middle of an answer: closes the connection, so that the client notices
        except Exception as error:
            response = errors.response(as_api_error(error), scope["path"])
            await response(scope, receive, send)

    async def _health(self) -> Response:
        """Health of the gateway; Ray checks the replicas."""
        status = "draining" if self.is_draining else "loading" if self.replicas is None else "ready"
        return JSONResponse({"status": status})

    async def _ready(self) -> Response:
        num_ready = await self._served_by().num_ready()
        if not num_ready:
            raise unavailable("no replica is ready")
        return JSONResponse({"status": "ready", "replicas": num_ready})

    async def _show_metrics(self) -> Response:
        texts = {} if self.replicas is None else await self.replicas.metrics()
        return Response(self._metrics.text(texts), media_type=metrics.CONTENT_TYPE)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        replicas = self._served_by()
        request = await self._read(scope, receive)
        timeout = Headers(scope=scope).get(caller.TIMEOUT)
        client = Caller.of(request.client, timeout, self._limits.request_s)
        relaying = self._relay(replicas, request, send, client.deadline)
        if (relay := await unless_gone(receive, relaying)) is not None:
            relay.result()

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
        headers = tuple((k, v) for k, v in scope["headers"] if k.decode("latin-1") in _FORWARDED)
        headers += ((REQUEST_ID.encode(), request_id.get().encode()),)
        client = scope.get(CLIENT, "")
        return HttpRequest(
            scope["method"], scope["path"], scope["query_string"], headers, data, client,
            affinity.prefixes(data, client),
        )  # fmt: skip

    async def _relay(
        self, replicas: Replicas, request: HttpRequest, send: Send, deadline: Deadline
    ) -> None:
        """Sends a replica's answer to the client.

        Raises:
            ApiError: no replica answers, and nothing was sent.
        """
        refused: HttpStart | None = None
        for _ in range(_TRIES):
            if deadline.left_s <= 0:
                raise deadline.passed()
            answer = _SentAnswer(send, request.path)
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
                    await answer.break_off(deadline.passed())
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
                await answer.break_off(as_api_error(error))
                return
        if refused is None:
            why = f"{_TRIES} replicas ended while they had this request: it is not tried again"
            raise ApiError(500, why, code="replica_lost", may_retry=False)
        answer = _SentAnswer(send, request.path)
        await answer.begin(refused)
        await answer.end()


def _until(deadline: Deadline, request: HttpRequest) -> HttpRequest:
    """The request with a header of the seconds that are left."""
    timeout = (caller.TIMEOUT.encode(), f"{max(deadline.left_s, 0.001):.3f}".encode())
    return dataclasses.replace(request, headers=(*request.headers, timeout))


class _SentAnswer:
    """The part of an answer that the client has got."""

    def __init__(self, send: Send, path: str):
        """`path`: of the request, which determines the last event and the form of an error."""
        self._send = send
        self._path = path
        self._headers: dict[bytes, bytes] | None = None
        self._num_bytes, self._last = 0, b""

    @property
    def has_begun(self) -> bool:
        return self._headers is not None

    @property
    def is_whole(self) -> bool:
        """Whether everything was sent, even if the replica did not end the answer."""
        assert self._headers is not None
        length = self._headers.get(b"content-length")
        if length is None:
            last = (_STOP,) if self._path == _INFILL else _LAST
            return self._last.endswith(DONE) or any(mark in self._last for mark in last)
        return self._num_bytes == int(length)

    async def begin(self, start: HttpStart) -> None:
        """Sends the head, and the first part of the body."""
        self._headers = dict(start.headers)
        head = {"type": "http.response.start", "status": start.status}
        await self._send(head | {"headers": list(start.headers)})
        await self.go_on(start.body)

    async def go_on(self, part: bytes) -> None:
        self._num_bytes += len(part)
        self._last = part
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def break_off(self, error: ApiError) -> None:
        """Ends an answer that may be incomplete; an incomplete stream ends with the error.

        Raises:
            ReplicaLost: the answer is incomplete, and no stream: its connection has to be closed.
        """
        if not self.is_whole:
            if self._headers and b"content-length" in self._headers:
                raise ReplicaLost
            is_message = errors.has_path(self._path)
            last = errors.event(error) if is_message else b"data: " + error.body() + b"\n\n" + DONE
            await self.go_on(last)
        await self.end()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
