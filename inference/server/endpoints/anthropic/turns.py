"""Translates the turns of a conversation into messages of a chat completion."""

from collections.abc import Iterable, Sequence

from configs.errors import shown
from inference.server.endpoints.anthropic.fields import Block, ResultBlock, Role, Turn
from inference.server.protocol.errors import ApiError, invalid, missing
from inference.server.protocol.fields import ChatMessage, ContentPart
from inference.server.protocol.tool_fields import CalledFunction, EarlierCall

_ROLES = {  # types of blocks -> roles of their messages
    "text": ("user", "assistant", "system"),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
}
_REQUIRED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}


def read(system: str | list[Block] | None, turns: Sequence[Turn]) -> list[ChatMessage]:
    """The messages; raises an `ApiError` (400) that names the field.

    A result becomes a message of role `tool`; one of a failure begins with `Error:`. Thoughts
    become `reasoning_content`, except redacted ones, which only Anthropic can read.
    """
    reader = _Reader()
    if system:
        reader.add(Turn("system", system), "system")
    for index, turn in enumerate(turns):
        reader.add(turn, f"messages[{index}].content", f"messages[{index}].role")
    return reader.finish()


class _Reader:
    """Reads turn after turn."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._thoughts: dict[int, list[str]] = {}  # by the message's index
        self._pending: dict[str, str] = {}  # calls of the last turn without a result -> places

    def add(self, turn: Turn, where: str, role_place: str = "") -> None:
        """Adds a turn; `where` and `role_place` are the places of its content and its role."""
        is_first = all(message.role == "system" for message in self._messages)
        if is_first and turn.role == "assistant":
            raise invalid(role_place, "is user in the first message")
        if turn.role != "assistant":
            self._extend(turn, where)
            return
        if self._messages[-1].role != "assistant":
            self._check_answered()
            self._messages.append(ChatMessage("assistant", []))
        self._extend(turn, where)

    def finish(self) -> list[ChatMessage]:
        """Returns the messages of all turns."""
        self._check_answered()
        for index, thoughts in self._thoughts.items():
            self._messages[index].reasoning_content = "".join(thoughts)
        return self._messages

    def _check_answered(self) -> None:
        """Raises an `ApiError` (400) if a call of the last turn has no result."""
        for id, place in self._pending.items():
            raise invalid(place, f"has no tool_result in the next message: {shown(id)}")

    def _extend(self, turn: Turn, where: str) -> None:
        if not turn.content:
            raise invalid(where, "is empty")
        if isinstance(turn.content, str):
            self._add_text(turn.role, turn.content, where)
            return
        for index, block in enumerate(turn.content):
            place = f"{where}[{index}]"
            _check(block, turn.role, place)
            if block.type == "text":
                self._add_text(turn.role, block.text or "", place)
            elif block.type == "tool_use":
                self._add_call(block, place)
            elif block.type == "tool_result":
                self._add_result(block, place)
            elif block.thinking:
                self._thoughts.setdefault(len(self._messages) - 1, []).append(block.thinking)

    def _add_text(self, role: Role, text: str, place: str) -> None:
        if role != "assistant":
            self._check_results_first(place)
        if not self._messages or self._messages[-1].role != role:
            self._messages.append(ChatMessage(role, []))
        parts = self._messages[-1].content
        assert isinstance(parts, list)
        parts.append(ContentPart("text", text))

    def _check_results_first(self, place: str) -> None:
        for id in self._pending:
            raise invalid(place, f"comes before the tool_result of {shown(id)}")

    def _add_call(self, block: Block, place: str) -> None:
        assert block.id is not None and block.name is not None and block.input is not None
        if block.id in self._pending:
            raise invalid(f"{place}.id", f"is that of another tool_use: {shown(block.id)}")
        self._pending[block.id] = place
        call = EarlierCall(CalledFunction(block.name, block.input), block.id, "function")
        message = self._messages[-1]
        message.tool_calls = [*(message.tool_calls or ()), call]

    def _add_result(self, block: Block, place: str) -> None:
        assert block.tool_use_id is not None
        if self._pending.pop(block.tool_use_id, None) is None:
            why = "is that of no open tool_use of the previous message"
            raise invalid(f"{place}.tool_use_id", f"{why}: {shown(block.tool_use_id)}")
        parts = _parts(block.content or "", f"{place}.content")
        if block.is_error:
            parts.insert(0, ContentPart("text", "Error:"))
        self._messages.append(ChatMessage("tool", parts, tool_call_id=block.tool_use_id))


def _check(block: Block, role: str, place: str) -> None:
    """Checks that a block is of a known type, complete, and in a message of its role."""
    if block.type not in _ROLES:
        raise _unsupported(block.type, place, _ROLES)
    if role not in _ROLES[block.type]:
        why = f"{block.type} belongs into a message of role {_ROLES[block.type][0]}"
        raise invalid(f"{place}.type", why)
    for name in _REQUIRED[block.type]:
        if getattr(block, name) is None:
            raise missing(f"{place}.{name}")
    if block.text == "" and block.type == "text":
        raise invalid(f"{place}.text", "is empty")


def _parts(content: str | list[ResultBlock], where: str) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    for index, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(part.type, f"{where}[{index}]", ("text",))
        if part.text is None:
            raise missing(f"{where}[{index}].text")
    return [ContentPart("text", part.text) for part in content]


def _unsupported(kind: str, place: str, known: Iterable[str]) -> ApiError:
    why = f"is one of {', '.join(known)}, not {shown(kind)}: this server reads text only"
    return invalid(f"{place}.type", why, "unsupported")
