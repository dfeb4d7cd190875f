"""The HTTP application: which path is answered by what."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from inference.server.endpoints import status, tokens
from inference.server.endpoints.answers import told
from inference.server.endpoints.chat import Chat
from inference.server.endpoints.completions import Completions
from inference.server.protocol import fields, parse
from inference.server.protocol.errors import ApiError
from inference.server.service import Service
from inference.server.web import body
from inference.server.web.access import Access, Keys
from inference.server.web.event_stream import EventStream, primed

_MAX_NAMED = 16  # fields that were ignored

_log = logging.getLogger(__name__)

Work = Callable[[Service, Any], Awaitable[Response]]


def application(service: Service, keys: Keys | None = None, is_local: bool = True) -> ASGIApp:
    """The whole of it; `keys` and `is_local` as `Access` takes them."""

    def get(path: str, work: Callable[..., Awaitable[Response]]) -> Route:
        async def answer(request: Request) -> Response:
            return await work(service, **request.path_params)

        return Route(path, answer, methods=["GET"])

    def post(path: str, kind: type[msgspec.Struct], work: Work) -> Route:
        async def answer(request: Request) -> Response:
            return await _posted(service, request, kind, work)

        return Route(path, answer, methods=["POST"])

    routes = [
        get("/v1/models", status.models),
        get("/v1/models/{id:path}", status.model),
        get("/health", status.health),
        get("/ready", status.ready),
        get("/version", status.version),
        get("/metrics", status.show_metrics),
        get("/tokenizer_info", tokens.tokenizer_info),
        post("/tokenize", fields.TokenizeRequest, tokens.tokenize),
        post("/detokenize", fields.DetokenizeRequest, tokens.detokenize),
        post("/v1/completions", fields.CompletionRequest, _completions),
        post("/v1/chat/completions", fields.ChatRequest, _chat),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _failed,
        HTTPException: _no_such_path,
        Exception: _failed,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Access(app, keys, is_local)


async def _completions(service: Service, request: fields.CompletionRequest) -> Response:
    return await _answer(service, Completions(service, request), bool(request.stream))


async def _chat(service: Service, request: fields.ChatRequest) -> Response:
    return await _answer(service, Chat(service, request), bool(request.stream))


async def _answer(service: Service, asked: Completions | Chat, streams: bool) -> Response:
    service.check_ready()
    await asked.prepare()
    if not streams:
        return await asked.answer()
    events = await primed(asked.events())
    left = service.metrics.disconnected
    return EventStream(events, service.limits.idle_s, _last_event, left)


async def _posted(
    service: Service, request: Request, kind: type[msgspec.Struct], work: Work
) -> Response:
    """Reads a body and answers it, unless the client leaves before."""
    limits = service.limits
    try:
        data = await body.read(request, limits.body_bytes, limits.body_s)
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    parsed = parse.parse(data, kind)
    working = asyncio.ensure_future(work(service, parsed.request))
    leaving = asyncio.ensure_future(body.gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            service.metrics.disconnected()
            return Response(status_code=499)
        response = working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if parsed.ignored:
        names = [parse.as_header(name) for name in parsed.ignored[:_MAX_NAMED]]
        response.headers["x-ignored-params"] = ", ".join(names)
        service.metrics.ignored(len(parsed.ignored))
    return response


def _last_event(error: Exception) -> bytes:
    if not isinstance(error, ApiError):
        _log.error("a stream ends with an error", exc_info=error)
    return b"data: " + told(error).body() + b"\n\n"


async def _failed(request: Request, error: Exception) -> Response:
    found = told(error)
    return Response(found.body(), found.status, found.headers, "application/json")


async def _no_such_path(request: Request, error: HTTPException) -> Response:
    what = "method" if error.status_code == 405 else "path"
    found = ApiError(error.status_code, f"this server has no such {what}")
    return Response(found.body(), found.status, error.headers, "application/json")
