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
    """New text and calls of a message, and of the thought before them."""

    content: str
    calls: list[CallDelta]
    finish_reason: str | None
    reasoning: str = ""

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.calls or self.reasoning)

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
            return News(text, [], piece.finish_reason, thought)
        parts = self._parser.push(text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        content = "".join(part.text for part in parts if part.index is None)
        calls: dict[int, CallDelta] = {}
        for part in parts:
            if part.index is not None and (self._max_calls is None or part.index < self._max_calls):
                _add(calls, part.index, part)
        self._has_calls |= bool(calls)
        is_call = self._has_calls and piece.finish_reason == "stop"
        reason = "tool_calls" if is_call else piece.finish_reason
        return News(content, [*calls.values()], reason, thought)


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


def _add(calls: dict[int, CallDelta], index: int, part: Part) -> None:
    if part.name is not None:
        function = FunctionDelta(part.text, part.name)
        calls[index] = CallDelta(index, function, f"call_{secrets.token_hex(12)}", "function")
    elif index in calls:
        calls[index].function.arguments += part.text
    else:
        calls[index] = CallDelta(index, FunctionDelta(part.text))
