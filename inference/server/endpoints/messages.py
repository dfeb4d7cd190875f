"""Splits an answer into its thoughts, text and tool calls."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from inference.server.endpoints.answers import Piece
from inference.server.endpoints.reasoning import Reasoning
from inference.server.protocol.responses import AnswerMessage, CallDelta, FunctionDelta
from inference.server.protocol.tools import OfferedTools
from inference.text.layouts import Layout
from inference.text.thoughts import THINK, Segment
from inference.text.tool_calls.formats import Format
from inference.text.tool_calls.parser import Parser
from inference.text.tool_calls.stream import Part


class Thought(NamedTuple):
    """New text of a thought."""

    text: str


class News(NamedTuple):
    """New parts of a message in their order: thoughts, text and calls, each call at most once."""

    parts: list[Thought | str | CallDelta]
    finish_reason: str | None

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]

    @property
    def without_reasoning(self) -> "News":
        return self._replace(parts=[part for part in self.parts if not isinstance(part, Thought)])


class MessageReader:
    """Reads the pieces of one answer."""

    def __init__(
        self,
        offer: OfferedTools | None,
        format: Format,
        reasoning: Reasoning | None = None,
        thinks: bool = False,
        layout: Layout = THINK,
    ):
        """`offer`: tools of the request; None: calls stay text. `reasoning`: reads thoughts, which
        are a part of the text that has this layout, if it `thinks` from its beginning on.
        """
        self._reasoning = reasoning
        self._parser = Parser(format, offer.schemas, thinks, layout) if offer else None
        self._max_calls = 1 if offer is not None and not offer.is_parallel else None
        self._has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def read(self, piece: Piece) -> News:
        segments = [Segment(piece.text, is_thought=False)]
        if self._reasoning is not None:
            segments = self._reasoning.read(piece)
        parts: list[Thought | str | CallDelta] = []
        for text, is_thought in segments:
            parts += [Thought(text)] if is_thought else self._read_answer(text)
        if self._parser is not None and piece.finish_reason is not None:
            parts += self._told(self._parser.finish())
        is_call = self._has_calls and piece.finish_reason == "stop"
        return News(parts, "tool_calls" if is_call else piece.finish_reason)

    def _read_answer(self, text: str) -> Sequence[str | CallDelta]:
        if self._parser is not None:
            return self._told(self._parser.push(text))
        return [text] if text else []

    def _told(self, parts: list[Part]) -> list[str | CallDelta]:
        told = [_told(part) for part in parts if self._may_tell(part)]
        self._has_calls |= any(isinstance(part, CallDelta) for part in told)
        return told

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
