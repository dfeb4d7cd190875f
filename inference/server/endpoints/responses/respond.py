"""POST /v1/responses: an answer to a conversation. Nothing is stored."""

import copy
import itertools
import secrets
import time
from contextlib import aclosing
from typing import Literal

import msgspec
from starlette.responses import Response

from inference.server.endpoints.answers import Piece, stream_failed
from inference.server.endpoints.chat import Chat
from inference.server.endpoints.envelope import whole
from inference.server.endpoints.messages import News
from inference.server.endpoints.responses import bodies, conversation
from inference.server.endpoints.responses.bodies import Event, ResponseBody, ResponseUsage
from inference.server.endpoints.responses.fields import ResponsesRequest, TextConfig, TextFormat
from inference.server.endpoints.responses.output import Output
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError
from inference.server.protocol.event_stream import Events
from inference.server.service import Service

_ENCODER = msgspec.json.Encoder()
_CUTS: dict[str, Literal["max_output_tokens", "abort"]] = {
    "length": "max_output_tokens",
    "abort": "abort",
}


class Respond:
    """A response."""

    def __init__(self, service: Service, request: ResponsesRequest, caller: Caller):
        """Reads the request; an `ApiError` names a wrong field."""
        self._chat = Chat(service, conversation.read(request), caller)
        self._service = service
        self._output = Output()
        self._numbers = itertools.count()
        text = request.text or TextConfig()
        text.format = text.format or TextFormat("text")
        self._body = ResponseBody(
            f"resp_{secrets.token_hex(14)}", int(time.time()), request.model or service.model_name,
            "in_progress",
            [], request.instructions, request.max_output_tokens, request.metadata or {},
            request.parallel_tool_calls is not False,
            1.0 if request.temperature is None else request.temperature, text,
            request.tool_choice or "auto", request.tools or [], request.top_logprobs or 0,
            1.0 if request.top_p is None else request.top_p,
            bodies.Reasoning(request.reasoning.effort if request.reasoning else None), request.user,
        )  # fmt: skip

    async def prepare(self) -> None:
        """Encodes the conversation; an `ApiError` names a wrong field."""
        try:
            await self._chat.prepare()
        except ApiError as error:
            raise conversation.renamed(error) from None

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
                    events = [] if begun else self._begin()
                    begun = True
                    events += self._take(piece, news)
                    if events:
                        yield b"".join(map(self._encoded, events))
        except Exception as error:
            if not begun:
                raise
            failure = stream_failed(self._service, error)
            events = self._output.close("incomplete")
            code = "invalid_prompt" if failure.status < 500 else "server_error"
            self._body.error = bodies.Failure(code, failure.message)
            self._body.output, self._body.status = self._output.items, "failed"
            events.append(bodies.Failed(response=self._body))
            yield b"".join(map(self._encoded, events))

    def _begin(self) -> list[Event]:
        empty = copy.copy(self._body)
        return [bodies.Created(response=empty), bodies.InProgress(response=empty)]

    def _take(self, piece: Piece, news: News) -> list[Event]:
        logprobs = self._chat.logprobs_of(piece)
        events = self._output.take(news, logprobs.content if logprobs else [])
        return events if news.finish_reason is None else events + self._end(news.finish_reason)

    def _end(self, reason: str) -> list[Event]:
        is_cut = reason in _CUTS
        events = self._output.close("incomplete" if is_cut else "completed")
        body, usage = self._body, self._chat.usage
        body.output, body.status = self._output.items, "incomplete" if is_cut else "completed"
        if is_cut:
            body.incomplete_details = bodies.Incomplete(_CUTS[reason])
        else:
            body.completed_at = int(time.time())
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        details = usage.completion_tokens_details
        body.usage = ResponseUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
            bodies.InputDetails(cached),
            bodies.OutputDetails(details.reasoning_tokens if details else 0),
        )  # fmt: skip
        for name, value in self._chat.token_fields.items():
            setattr(body, name, value)
        last = bodies.Cut(response=body) if is_cut else bodies.Completed(response=body)
        return [*events, last]

    def _encoded(self, event: Event) -> bytes:
        event.sequence_number = next(self._numbers)
        name = type(event).__struct_config__.tag
        return f"event: {name}\ndata: ".encode() + _ENCODER.encode(event) + b"\n\n"
