"""What the tests of /v1/messages ask, and how they read a stream as it is sent."""

import json

from tests.inference.server.fake_engine import TEMPLATE

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED = [{"role": "user", "content": "Hi"}]
HOW = {"model": "fake", "max_tokens": 400, "messages": ASKED, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather", "description": "Of a city.", "input_schema": {
        "type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"],
        "additionalProperties": False,
    },
}  # fmt: skip
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"rain": true}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"rain": True}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "wet"}
SWITCH = TEMPLATE + "{{ enable_thinking }}"  # a template that reads whether to think


def text(value, **more):
    return {"type": "text", "text": value} | more


def user(*content):
    return {"role": "user", "content": list(content)}


def assistant(*content):
    return {"role": "assistant", "content": list(content)}


def turns(*pairs):
    """A conversation as the fake engine's template writes it."""
    return "".join(f"<|start|>{role}\n{text}<|end|>" for role, text in pairs)


def events_of(stream):
    """(name, data) of each event."""
    events = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events
