"""Calls of every format by OpenAI's client: chosen, forced, whole and streamed."""

import json

import jsonschema
import openai
import pytest

from inference.text.tool_calls.formats import FORMATS
from tests.inference.text.tool_calls import native

ASKED = [{"role": "user", "content": "How is it in Zürich?"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in native.SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
HOW = {"model": "fake", "messages": ASKED, "temperature": 0, "tools": TOOLS}
CALLS = [
    ("weather", {"city": 'Zürich "x" </p', "days": 2, "is_long": True}),
    ("web-search", {"query": "a\nb", "filter": {"a": [1, "}"]}, "tags": ["x", "ü"]}), ("now", {}),
]  # fmt: skip


def among(mode: str, name: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def written(format: str) -> str:
    """The calls as a model writes them."""
    if format in native.FORMATS:
        return native.FORMATS[format].write(*CALLS)
    key = FORMATS[format].shape.key
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in CALLS]
    if format == "json":
        return f"[{', '.join(objects)}]"
    if format == "llama3_json":
        return "; ".join(objects)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def calls_of(message) -> list[tuple[str, dict]]:
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    calls = (call.function for call in message.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.fixture(params=FORMATS)
def format(request, perch, parrot, monkeypatch):
    monkeypatch.setattr(perch.service, "_tool_call_parser", request.param)
    parrot.says = f"Let me see.\n{written(request.param)}"
    return request.param


def test_streamed_arguments_add_up_to_the_same_calls(client, format):
    whole = client.chat.completions.create(**HOW).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
    assert calls_of(whole.message) == CALLS
    with client.chat.completions.stream(**HOW) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed.message) == CALLS and streamed.message.content == "Let me see."
    items = client.responses.create(
        model="fake", input=ASKED,
        tools=[{"type": "function", **tool["function"]} for tool in TOOLS],
    ).output  # fmt: skip
    assert [item.type for item in items] == ["message"] + ["function_call"] * len(CALLS)
    assert [json.loads(item.arguments) for item in items[1:]] == [given for _, given in CALLS]


def test_a_forced_call_obeys_its_schema(client, format):
    with client.chat.completions.stream(**HOW, tool_choice=NAMED, max_tokens=400) as stream:
        message = stream.get_final_completion().choices[0].message
    ((name, arguments),) = calls_of(message)
    assert name == "weather" and message.content is None
    jsonschema.validate(arguments, native.CITY)


@pytest.mark.parametrize("choice, parallel, is_forced, num_calls", [
    ("auto", None, False, 3), ("auto", True, False, 3), ("auto", False, False, 1),
    ("none", None, False, 0), (openai.omit, None, False, 3), ("required", None, True, 1),
    ("required", False, True, 1), (NAMED, None, True, 1),
    (among("auto", "weather"), None, False, 1), (among("required", "weather"), None, True, 1),
])  # fmt: skip
def test_choices(client, parrot, choice, parallel, is_forced, num_calls):
    """What is not forced is what the model says, as far as it is permitted."""
    parrot.says = written("hermes")
    extra = {} if parallel is None else {"parallel_tool_calls": parallel}
    how = HOW | {"tool_choice": choice, "max_tokens": 400}
    message = client.chat.completions.create(**how, **extra).choices[0].message
    assert len(message.tool_calls or ()) == num_calls
    assert (parrot.params[-1].grammar is not None) == is_forced


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_changes_no_forced_call(client, strict):
    """All are of their schemas."""
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}
    how = HOW | {"tools": [tool], "tool_choice": "required"}
    ((_, arguments),) = calls_of(client.chat.completions.create(**how).choices[0].message)
    jsonschema.validate(arguments, native.CITY)


NOT_OBEYED = {"type": "object", "properties": {"a": {"$dynamicRef": "#x"}}}
BAD = {"type": "function", "function": {"name": "bad", "parameters": NOT_OBEYED}}


def error_of(client, **more) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**HOW | more)
    assert "\n" not in raised.value.body["message"]
    return raised.value


def test_a_schema_that_no_format_obeys(client, format):
    error = error_of(client, tools=[*TOOLS, BAD], tool_choice="required")
    assert error.param == "tools[3].function.parameters" and "$dynamicRef" in error.message


@pytest.mark.parametrize("more, param", [
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": among("auto", "g")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tool_choice": "any"}, "tool_choice"), ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
])  # fmt: skip
def test_what_is_wrong_with_tools_is_named(client, more, param):
    assert error_of(client, **more).param == param
