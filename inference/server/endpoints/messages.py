"""Splits an answer into its thought, text and tool calls."""

import secrets
from typing import NamedTuple

from inference.server.endpoints.answers import Piece
from inference.server.endpoints.reasoning import Reasoning
from inference.server.protocol.responses import AnswerMessage, CallDelta, FunctionDelta
from inference.server.protocol.tools import OfferedTools
from inference.text.thoughts import THINK, Marks
from inference.text.tool_calls.formats import Format
from inference.text.tool_calls.parser import Parser
from inference.text.tool_calls.stream import Part


class News(NamedTuple):
    """New parts of a message, text and calls in their order, and of the thought before them. A call
    has one part at most.
    """

    parts: list[str | CallDelta]
    finish_reason: str | None
    reasoning: str = ""

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]

    @property
    def has_text(self) -> bool:
        return bool(self.parts or self.reasoning)

    @property
    def without_reasoning(self) -> "News":
        return self._replace(reasoning="")


class MessageReader:
    """Reads the pieces of one answer."""

    def __init__(
        self,
        offer: OfferedTools | None,
        format: Format,
        reasoning: Reasoning | None = None,
        thinks: bool = False,
        marks: Marks = THINK,
    ):
        """`offer`: tools of the request; None: calls stay text. `reasoning`: reads the thought;
        None: it is a part of the text, with its marks, which begins with it if it `thinks`.
        """
        self._reasoning = reasoning
        thinks = thinks and reasoning is None
        self._parser = Parser(format, offer.schemas, thinks, marks) if offer else None
        self._max_calls = 1 if offer is not None and not offer.is_parallel else None
        self._has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def read(self, piece: Piece) -> News:
        thought, text = "", piece.text
        if self._reasoning is not None:
            thought, text = self._reasoning.read(piece)
        if self._parser is None:
            return News([text] if text else [], piece.finish_reason, thought)
        parts = self._parser.push(text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        told = [_told(part) for part in parts if self._may_tell(part)]
        self._has_calls |= any(isinstance(part, CallDelta) for part in told)
        is_call = self._has_calls and piece.finish_reason == "stop"
        reason = "tool_calls" if is_call else piece.finish_reason
        return News(told, reason, thought)

    def _may_tell(self, part: Part) -> bool:
        return part.index is None or self._max_calls is None or part.index < self._max_calls


def add(message: AnswerMessage, news: News) -> None:
    """Adds new text and calls to a message."""
    if news.reasoning:
        thought = (message.reasoning or "") + news.reasoning
        message.reasoning = message.reasoning_content = thought
    message.content = (message.content or "") + news.content
    for delta in news.calls:
        calls = message.tool_calls = message.tool_calls or []
        if delta.index == len(calls):
            calls.append(delta.whole())
        else:
            calls[delta.index].function.arguments += delta.function.arguments
    if message.tool_calls and not message.content:
        message.content = None


def _told(part: Part) -> str | CallDelta:
    if part.index is None:
        return part.text
    if part.name is None:
        return CallDelta(part.index, FunctionDelta(part.text))
    function = FunctionDelta(part.text, part.name)
    return CallDelta(part.index, function, f"call_{secrets.token_hex(12)}", "function")
