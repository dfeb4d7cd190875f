"""The blocks of an answer as they grow, and the events of their growth."""

import copy
from typing import Any

import msgspec

from inference.server.endpoints.anthropic.bodies import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    NewInput,
    NewText,
    NewThought,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from inference.server.endpoints.messages import News, Thought
from inference.server.protocol.responses import CallDelta

_DELTAS: dict[type[AnswerBlock], type[NewText] | type[NewThought] | type[NewInput]] = {
    TextBlock: NewText,
    ThinkingBlock: NewThought,
    ToolUseBlock: NewInput,
}


class Output:
    """The content of one answer."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._pieces: list[str] = []  # of the last block
        self._is_open = False  # the last block may grow

    def take(self, news: News) -> list[Event]:
        """Adds the next piece of the answer; returns its events."""
        events: list[Event] = []
        for part in news.parts:
            if isinstance(part, str):
                events += self._write(part, TextBlock)
            elif isinstance(part, Thought):
                events += self._write(part.text, ThinkingBlock)
            else:
                if isinstance(part.id, str):
                    events += self._open(_block(part))
                events += self._grow(part.function.arguments)
        return events

    def close(self) -> list[Event]:
        """Ends the last block; returns its events."""
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._pieces)
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        else:
            block.input = _read(text)
        return [BlockStop(len(self.blocks) - 1)]

    def _write(self, text: str, kind: type[TextBlock] | type[ThinkingBlock]) -> list[Event]:
        has_one = self._is_open and isinstance(self.blocks[-1], kind)
        events = self._open(kind()) if text and not has_one else []
        return events + self._grow(text)

    def _open(self, block: AnswerBlock) -> list[Event]:
        events = self.close()
        self.blocks.append(block)
        self._pieces, self._is_open = [], True
        return [*events, BlockStart(len(self.blocks) - 1, copy.copy(block))]

    def _grow(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        delta = _DELTAS[type(self.blocks[-1])](text)
        return [BlockDelta(len(self.blocks) - 1, delta)]


def _block(call: CallDelta) -> ToolUseBlock:
    assert isinstance(call.id, str) and isinstance(call.function.name, str)
    return ToolUseBlock(f"toolu_{call.id.removeprefix('call_')}", call.function.name, {})


def _read(arguments: str) -> dict[str, Any]:
    """The input of a call from its JSON, which may be invalid."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
