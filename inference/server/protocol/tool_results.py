"""Checks which messages of a conversation have tool calls, and that results answer them."""

from collections.abc import Sequence, Set

from configs.errors import shown
from inference.server.protocol.errors import invalid
from inference.server.protocol.fields import ChatMessage


def check(messages: Sequence[ChatMessage]) -> None:
    """Checks that each result answers a call of an earlier message, by its id where both have one.

    Raises:
        ApiError: 400, names the field of the first message that is wrong.
    """
    call_ids: set[str | None] = set()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"{place}.tool_calls", "belongs to a message of role assistant")
        if message.tool_call_id is not None and message.role != "tool":
            raise invalid(f"{place}.tool_call_id", "belongs to a message of role tool")
        call_ids.update(call.id for call in message.tool_calls or ())
        if message.role == "tool":
            check_answers(message.tool_call_id, call_ids, f"{place}.tool_call_id")


def check_answers(id: str | None, call_ids: Set[str | None], place: str) -> None:
    """Raises an `ApiError` (400) unless a result of this id answers one of the calls before it."""
    if not call_ids:
        raise invalid(place, "answers no tool call: no earlier message has one")
    if id is not None and not {id, None} & call_ids:
        raise invalid(place, f"is that of no tool call of an earlier message: {shown(id)}")
