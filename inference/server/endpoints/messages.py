"""Splits an answer into text and tool calls."""

import secrets
from typing import NamedTuple

from inference.server.endpoints.answers import Piece
from inference.server.protocol.responses import AnswerMessage, CallDelta, FunctionDelta
from inference.server.protocol.tools import OfferedTools
from inference.text.tool_calls.formats import Format
from inference.text.tool_calls.parser import Parser
from inference.text.tool_calls.stream import Part


class News(NamedTuple):
    """New text and calls of a message."""

    content: str
    calls: list[CallDelta]
    finish_reason: str | None


class MessageReader:
    """Reads the pieces of one answer."""

    def __init__(self, offer: OfferedTools | None, format: Format, thinks: bool = False):
        """`offer`: tools of the request; None: calls stay text; `thinks` as `Parser` takes it."""
        self._parser = Parser(format, offer.schemas, thinks) if offer is not None else None
        self._max_calls = 1 if offer is not None and not offer.is_parallel else None
        self._has_calls = False

    def read(self, piece: Piece) -> News:
        if self._parser is None:
            return News(piece.text, [], piece.finish_reason)
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        content = "".join(part.text for part in parts if part.index is None)
        calls: dict[int, CallDelta] = {}
        for part in parts:
            if part.index is not None and (self._max_calls is None or part.index < self._max_calls):
                _add(calls, part.index, part)
        self._has_calls |= bool(calls)
        is_call = self._has_calls and piece.finish_reason == "stop"
        return News(content, [*calls.values()], "tool_calls" if is_call else piece.finish_reason)


def add(message: AnswerMessage, news: News) -> None:
    """Adds new text and calls to a message."""
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
