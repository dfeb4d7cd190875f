"""Tools, and calls of earlier messages, as chat templates read them."""

import json
from collections.abc import Sequence
from typing import Any

from inference.text.tool_calls import call_ids, formats

_SYSTEM = """You can call functions:
{tools}

To call one, answer with JSON alone: {{"name": the function's name, "arguments": an object}}.
To call several, answer with a list of such objects. Otherwise answer as usual."""


def prepare(
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]] | None,
    template: str | None,
) -> tuple[list[dict[str, object]], Sequence[dict[str, object]] | None]:
    """Adapts messages and tools to a template: calls' arguments, which clients send as JSON, become
    objects, and ids those that it reads; a template without tools gets a system message, one
    without calls gets text.
    """
    renamed = call_ids.adapt(messages, template)
    prepared = [_with_arguments(message, _loads) for message in renamed]
    if not formats.knows_calls(template):
        prepared = [_as_text(message) for message in prepared]
    if tools and not formats.knows_tools(template):
        return _with_system(prepared, tools), None
    return prepared, tools


def with_texts(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The same messages with arguments as JSON again, which some templates want."""
    return [_with_arguments(message, _dumps) for message in messages]


def _with_arguments(message: dict[str, Any], convert: Any) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = convert(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _loads(arguments: object) -> object:
    """An object; a text that is none, as a model may have written it, stays."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _dumps(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    plain = [{name: call[name] for name in ("name", "arguments")} for call in calls]
    text = json.dumps(plain[0] if len(plain) == 1 else plain, ensure_ascii=False)
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content")
    return {**fields, "content": f"{content}\n{text}" if content else text}


def _with_system(
    messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]
) -> list[dict[str, object]]:
    """With a system message that describes the tools, behind what the user's own says."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    description = _SYSTEM.format(tools=functions)
    first, *turns = messages
    if first["role"] != "system":
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{description}"}, *turns]
