"""Completions, chats, responses and messages, whole or as a stream of events."""

from starlette.responses import Response

from inference.server.endpoints.answers import stream_failed
from inference.server.endpoints.anthropic.bodies import Ping
from inference.server.endpoints.anthropic.fields import MessagesRequest
from inference.server.endpoints.anthropic.respond import Messages, encoded
from inference.server.endpoints.chat import Chat
from inference.server.endpoints.completions import Completions
from inference.server.endpoints.infill import Filling
from inference.server.endpoints.responses.fields import ResponsesRequest
from inference.server.endpoints.responses.respond import Respond
from inference.server.protocol.caller import Caller
from inference.server.protocol.event_stream import KEEP_ALIVE, EventStream, primed
from inference.server.protocol.fields import ChatRequest, CompletionRequest, InfillRequest
from inference.server.service import Service

_Request = CompletionRequest | InfillRequest | ChatRequest | ResponsesRequest | MessagesRequest
_Endpoint = Completions | Filling | Chat | Respond | Messages


async def completions(service: Service, request: CompletionRequest, caller: Caller) -> Response:
    """Create a completion: continue texts, or score them."""
    return await _answer(service, Completions(service, request, caller), request, caller)


async def infill(service: Service, request: InfillRequest, caller: Caller) -> Response:
    """Fill the gap between two texts, as llama.cpp's server does."""
    return await _answer(service, Filling(service, request, caller), request, caller)


async def chat(service: Service, request: ChatRequest, caller: Caller) -> Response:
    """Create a chat completion: the next message of a conversation."""
    response = await _answer(service, Chat(service, request, caller), request, caller)
    return _with_format(service, request, response)


async def responses(service: Service, request: ResponsesRequest, caller: Caller) -> Response:
    """Create a response: an answer to a conversation. Nothing is stored."""
    service.check_ready()
    response = await _answer(service, Respond(service, request, caller), request, caller)
    return _with_format(service, request, response)


async def messages(service: Service, request: MessagesRequest, caller: Caller) -> Response:
    """Create a message: the next one of a conversation, in Anthropic's form."""
    service.check_ready()
    endpoint, ping = Messages(service, request, caller), encoded(Ping())
    response = await _answer(service, endpoint, request, caller, ping)
    return _with_format(service, request, response)


def _with_format(
    service: Service, request: ChatRequest | ResponsesRequest | MessagesRequest, response: Response
) -> Response:
    """Adds a header if the request has tools, and this model's calls are not parsed."""
    if request.tools and not service.tool_format.is_read:
        response.headers["x-unread-tool-format"] = service.tool_format.name
    return response


async def _answer(
    service: Service,
    endpoint: _Endpoint,
    request: _Request,
    caller: Caller,
    keep_alive: bytes = KEEP_ALIVE,
) -> Response:
    """Answers a request; rejects it before any work if there is no room for one sequence."""
    service.check_room(caller, priority=request.priority or 0)
    async with caller.deadline.enforce():
        await endpoint.prepare()
    if not request.stream:
        return await endpoint.answer()
    events = await primed(endpoint.events())

    def last_event(error: Exception) -> bytes:
        return b"data: " + stream_failed(service, error).body() + b"\n\n"

    return EventStream(
        events, service.limits.idle_s, last_event, service.metrics.disconnected, keep_alive
    )
