"""Completions and chats, whole or as a stream."""

import logging

from starlette.responses import Response

from inference.server import traces
from inference.server.endpoints.answers import as_api_error
from inference.server.endpoints.chat import Chat
from inference.server.endpoints.completions import Completions
from inference.server.endpoints.responses.fields import ResponsesRequest
from inference.server.endpoints.responses.respond import Respond
from inference.server.protocol import fields
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError
from inference.server.service import Service
from inference.server.web.event_stream import EventStream, primed

_log = logging.getLogger(__name__)


async def completions(
    service: Service, request: fields.CompletionRequest, caller: Caller
) -> Response:
    """Create a completion: continue texts, or score them."""
    return await _answer(service, Completions(service, request, caller), bool(request.stream))


async def chat(service: Service, request: fields.ChatRequest, caller: Caller) -> Response:
    """Create a chat completion: the next message of a conversation."""
    return await _answer(service, Chat(service, request, caller), bool(request.stream))


async def responses(service: Service, request: ResponsesRequest, caller: Caller) -> Response:
    """Create a response: an answer to a conversation, of which nothing is stored."""
    service.check_ready()
    return await _answer(service, Respond(service, request, caller), bool(request.stream))


async def _answer(service: Service, asked: Completions | Chat | Respond, streams: bool) -> Response:
    service.check_ready()
    asked.check_room()
    await asked.prepare()
    if not streams:
        return await asked.answer()
    events = await primed(asked.events())
    left = service.metrics.disconnected

    def last_event(error: Exception) -> bytes:
        service.metrics.stream_failed()
        traces.current().failed("stream_error")
        return _last_event(error)

    return EventStream(events, service.limits.idle_s, last_event, left)


def _last_event(error: Exception) -> bytes:
    if not isinstance(error, ApiError):
        _log.error("a stream ends with an error", exc_info=error)
    return b"data: " + as_api_error(error).body() + b"\n\n"
