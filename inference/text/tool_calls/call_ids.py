"""Ids of earlier calls, in the form that chat templates require."""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

_SHORT_IDS = re.compile(r"\blength\s*!=\s*9\b")  # in Mistral's templates, which reject others
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_NAMED_MARK = "<|tool_call_begin|>{{"  # Kimi's, where the id is all that names the function

Message = dict[str, Any]


def adapt(messages: Sequence[Message], template: str | None) -> list[Message]:
    """The same messages with ids that the template reads, in calls and in their results. Clients
    send ids of this server or of another one, which have no such form.
    """
    if _SHORT_IDS.search(template or ""):
        return _renamed(messages, lambda id, name, n: _short(id))
    if _NAMED_MARK in "".join((template or "").split()):
        return _renamed(messages, lambda id, name, n: f"functions.{name}:{n}")
    return list(messages)


def _renamed(messages: Sequence[Message], rename: Callable[[str, str, int], str]) -> list[Message]:
    """Renames each id by the function that it calls, and by the number of calls before it."""
    new_ids: dict[str, str] = {}
    renamed, num_calls = [], 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                id = call.get("id") or str(num_calls)
                new_ids[id] = rename(id, call["function"]["name"], num_calls)
                calls.append({**call, "id": new_ids[id]})
                num_calls += 1
            message = {**message, "tool_calls": calls}
        elif (id := message.get("tool_call_id")) is not None:
            message = {**message, "tool_call_id": new_ids.get(id) or rename(id, "", num_calls)}
        renamed.append(message)
    return renamed


def _short(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
