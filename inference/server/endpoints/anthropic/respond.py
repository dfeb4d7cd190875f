"""POST /v1/messages: the next message of a conversation; and the number of its tokens."""

import secrets
from contextlib import aclosing

import msgspec
from starlette.responses import Response

from inference.server.endpoints.answers import Piece, stream_failed
from inference.server.endpoints.anthropic import bodies, conversation, errors
from inference.server.endpoints.anthropic.bodies import Event, MessageBody, MessageUsage
from inference.server.endpoints.anthropic.fields import CountTokensRequest, MessagesRequest
from inference.server.endpoints.anthropic.output import Output
from inference.server.endpoints.chat import Chat, encode
from inference.server.endpoints.envelope import whole
from inference.server.endpoints.messages import News
from inference.server.protocol import tools
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError
from inference.server.protocol.event_stream import Events
from inference.server.service import Service

_ENCODER = msgspec.json.Encoder()
_REASONS: dict[str, bodies.StopReason] = {
    "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn",
}  # fmt: skip


class Messages:
    """A message."""

    def __init__(self, service: Service, request: MessagesRequest, caller: Caller):
        """Reads the request; an `ApiError` names a wrong field."""
        self._chat = Chat(service, conversation.read(request), caller)
        self._service = service
        self._output = Output()
        id = f"msg_{secrets.token_hex(14)}"
        self._body = MessageBody(id, request.model or service.model_name, [], MessageUsage(0))

    async def prepare(self) -> None:
        """Encodes the conversation; an `ApiError` names a wrong field."""
        try:
            await self._chat.prepare()
        except ApiError as error:
            raise conversation.renamed(error) from None
        self._body.usage = self._usage()

    async def answer(self) -> Response:
        """Returns the whole answer; an `ApiError` says that the engine cannot."""
        async with aclosing(self._chat.news()) as pieces:
            async for piece, news in pieces:
                self._take(piece, news)
        return whole(self._body)

    async def events(self) -> Events:
        """Yields the answer as it comes, from its first token on; errors as `answer`."""
        begun = False
        try:
            async with aclosing(self._chat.news()) as pieces:
                async for piece, news in pieces:
                    events = [] if begun else [bodies.MessageStart(self._body)]
                    data = b"".join(map(encoded, events))  # before the message changes
                    begun = True
                    data += b"".join(map(encoded, self._take(piece, news)))
                    if data:
                        yield data
        except Exception as error:
            if not begun:
                raise
            yield errors.event(stream_failed(self._service, error))

    def _take(self, piece: Piece, news: News) -> list[Event]:
        events = self._output.take(news)
        if news.finish_reason is None:
            return events
        body = self._body
        events += self._output.close()
        body.content, body.usage = self._output.blocks, self._usage()
        body.stop_reason = _REASONS.get(news.finish_reason, "end_turn")
        if body.stop_reason == "end_turn" and isinstance(piece.stop_reason, str):
            body.stop_reason, body.stop_sequence = "stop_sequence", piece.stop_reason
        end = bodies.End(body.stop_reason, body.stop_sequence)
        last = bodies.MessageDelta(end, body.usage)
        for name, value in self._chat.token_fields.items():
            setattr(body, name, value)
            setattr(last, name, value)
        return [*events, last, bodies.MessageStop()]

    def _usage(self) -> MessageUsage:
        usage = self._chat.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        details = usage.completion_tokens_details
        thought = bodies.OutputDetails(details.reasoning_tokens if details else 0)
        return MessageUsage(
            usage.prompt_tokens - cached, usage.completion_tokens, cached,
            output_tokens_details=thought,
        )  # fmt: skip


def encoded(event: Event) -> bytes:
    """An event as it is sent."""
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + _ENCODER.encode(event) + b"\n\n"


async def count_tokens(service: Service, request: CountTokensRequest, caller: Caller) -> Response:
    """Count the tokens of a conversation, as a message would read it.

    Raises:
        ApiError: a field is wrong, or it takes too long.
    """
    service.adapter_of(request.model)
    chat = conversation.read(request)
    try:
        async with caller.deadline.enforce():
            tokens = await encode(service, chat, tools.read(chat))
    except ApiError as error:
        raise conversation.renamed(error) from None
    return whole(bodies.TokenCount(len(tokens)))
