"""Tools, and calls of earlier messages, as chat templates read them."""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from configs.errors import InputError
from inference.text.chat_template import THOUGHT_FIELDS
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
    without calls gets text, and one whose calls are messages gets one call a message.
    """
    renamed = call_ids.adapt(messages, template)
    prepared = [_with_arguments(message, _loads) for message in renamed]
    if formats.of_template(template).is_message and formats.knows_calls(template):
        return _one_by_one(prepared), tools and [_described(tool) for tool in tools]
    if not formats.knows_calls(template):
        prepared = [_as_text(message) for message in prepared]
    if tools and not formats.knows_tools(template):
        return _with_system(prepared, tools), None
    return prepared, tools


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Divides messages with several calls; each call is followed by its result, and text before
    calls joins the thought, since templates write one of the two there.
    """
    divided: list[dict[str, object]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not calls:
            divided.append(message)
            continue
        results: list[dict[str, Any]] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        fields = _with_one_text(message)
        for call in calls:
            divided.append({**fields, "tool_calls": [call]})
            result = _result_of(call, results)
            divided += [] if result is None else [result]
            fields = {name: message[name] for name in ("role", "weight") if name in message}
            fields["content"] = ""
        divided += results
    return divided


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The same with its thought and its content, if it has both, as the thought."""
    thought = next((message[name] for name in THOUGHT_FIELDS if message.get(name)), None)
    if not thought or not message.get("content"):
        return message
    fields = {name: value for name, value in message.items() if name not in THOUGHT_FIELDS}
    return {**fields, "content": "", THOUGHT_FIELDS[0]: f"{thought}\n\n{message['content']}"}


def _result_of(call: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Takes the result of a call out of these, by its id or else the first one."""
    ids = [result.get("tool_call_id") for result in results]
    if call.get("id") in ids:
        return results.pop(ids.index(call["id"]))
    return results.pop(0) if None in ids[:1] else None


def _described(tool: dict[str, Any]) -> dict[str, object]:
    """A tool with a description, which templates do without."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def with_texts(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The same messages with arguments as JSON again, which some templates want."""
    return [_with_arguments(message, _dumps) for message in messages]


def encode(
    encode: Callable[..., list[int]], messages: Sequence[dict[str, object]], **options: Any
) -> list[int]:
    """Returns token ids of prepared messages, by `Tokenizer.apply_chat_template` or another of its
    methods, with options of that. Tries both forms of a call's arguments: templates read objects or
    texts.
    """
    as_texts = with_texts(messages)
    try:
        return encode(messages, **options)
    except InputError:
        if as_texts == list(messages):
            raise
        with contextlib.suppress(InputError):
            return encode(as_texts, **options)
        raise


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
