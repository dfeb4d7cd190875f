"""Tools of /v1/messages by Anthropic's client: whole, streamed, and a whole conversation."""

import json

import pytest

from inference.server.endpoints.answers import Piece
from inference.server.endpoints.anthropic.output import Output
from inference.server.endpoints.messages import MessageReader
from inference.server.protocol.tools import OfferedTools
from inference.text.tool_calls import formats
from tests.inference.server.anthropic.asking import (
    ASKED,
    CALL,
    CALL_NOW,
    HOW,
    NOW,
    PATH,
    TOOL,
    assistant,
    text,
    user,
)
from tests.inference.server.parrot import Parrot
from tests.inference.server.running import running

TOOLS = {"tools": [TOOL, NOW]}
MODES = [{"type": "any"}, {"type": "tool", "name": "weather"},
         {"type": "any", "disable_parallel_tool_use": True}]  # fmt: skip


@pytest.fixture(params=["whole", "streamed"])
def create(client, request):
    def ask(**asked):
        asked = HOW | TOOLS | asked
        if request.param == "whole":
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    return ask


def uses(message):
    blocks = [block for block in message.content if block.type == "tool_use"]
    assert len({block.id for block in blocks}) == len(blocks)
    assert all(block.id.startswith("toolu_") for block in blocks)
    return [(block.name, block.input) for block in blocks]


def test_text_and_calls(create, parrot):
    parrot.says = f"Let me see.\n{CALL}\n{CALL_NOW}"
    message = create()
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].text == "Let me see."
    assert uses(message) == [("weather", {"rain": True}), ("now", {})]
    assert message.stop_reason == "tool_use" and message.stop_sequence is None


def test_a_call_alone(create, parrot):
    parrot.says = CALL
    message = create(tool_choice={"type": "auto"})
    assert [block.type for block in message.content] == ["tool_use"]
    assert uses(message) == [("weather", {"rain": True})]


@pytest.mark.parametrize("choice", MODES)
def test_forced_calls(create, choice):
    message = create(tool_choice=choice, tools=[TOOL])
    assert uses(message) == [("weather", {"rain": False})] and len(message.content) == 1
    assert message.stop_reason == "tool_use"


def test_one_call_where_several_are_not_wanted(create, parrot):
    parrot.says = f"{CALL}\n{CALL_NOW}"
    message = create(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert uses(message) == [("weather", {"rain": True})]


def test_no_call(create, parrot):
    parrot.says = "It is cold."
    message = create()
    assert message.content[0].text == "It is cold." and message.stop_reason == "end_turn"
    parrot.says = CALL
    message = create(tool_choice={"type": "none"})
    assert message.content[0].text == CALL and not uses(message)
    assert message.stop_reason == "end_turn" and "weather" not in parrot.prompt


def test_a_call_that_is_cut_off(client, parrot):
    """Its input is no JSON yet: a whole answer has the text, a stream what can be read of it."""
    parrot.says = CALL
    asked = HOW | TOOLS | {"max_tokens": CALL.index("true") + 2}
    message = client.messages.create(**asked)
    assert message.stop_reason == "max_tokens"
    assert uses(message) == [("weather", {"INVALID_JSON": '{"rain": tr'})]
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "max_tokens" and streamed.content[0].name == "weather"


@pytest.mark.parametrize("arguments", ['{"rain": }', '{"rain": "\\ud800"}'])
def test_a_call_that_is_no_json(client, parrot, arguments):
    parrot.says = CALL.replace('{"rain": true}', arguments)
    message = client.messages.create(**HOW | TOOLS)
    assert uses(message) == [("weather", {"INVALID_JSON": arguments})]


def test_a_conversation(client, parrot):
    """An agent sends back what came, and what its tools say of it."""
    parrot.says = f"Let me see.\n{CALL}\n{CALL_NOW}"
    first = client.messages.create(**HOW | TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "wet"},
        {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [text("12:00")]},
    ]
    parrot.says = "It rains at noon."
    messages = [*ASKED, assistant(*first.content), user(*results, text("So?"))]
    second = client.messages.create(**HOW | TOOLS | {"messages": messages})
    assert second.content[0].text == "It rains at noon." and second.stop_reason == "end_turn"
    order = [parrot.prompt.index(part) for part in (CALL, CALL_NOW, "wet", "12:00", "So?")]
    assert order == sorted(order)
    parrot.says = None
    assert client.messages.create(**HOW | TOOLS | {"messages": messages[:-1] + [user(*results)]})


def test_a_format_that_is_not_read_is_said():
    engine = Parrot("{{ tools }}<|action_start|>{{ tool_calls }}")
    engine.says = "<|action_start|><|plugin|>weather<|action_end|>"
    with running(engine) as server:
        response = server.post(PATH, max_tokens=90, messages=ASKED, tools=[TOOL])
        assert response.headers["x-unread-tool-format"] == "internlm"
        assert response.json()["content"] == [text(engine.says)]


def test_a_piece_may_end_a_call_and_begin_others():
    """As it comes where a step has several tokens."""
    schemas = {"weather": TOOL["input_schema"], "now": NOW["input_schema"]}
    offer, output = OfferedTools([], schemas, {}, False, True), Output()
    reader = MessageReader(offer, formats.by_name("hermes", None))
    at = CALL.index("true")
    events = [
        event
        for piece in (CALL[:at], f"{CALL[at:]}\nAnd the time:\n{CALL_NOW}")
        for event in output.take(reader.read(Piece(0, piece)))
    ]
    events += output.take(reader.read(Piece(0, "", finish_reason="stop"))) + output.close()
    calls = [block for block in output.blocks if hasattr(block, "input")]
    assert [(call.name, call.input) for call in calls] == [("weather", {"rain": True}), ("now", {})]
    texts = [block.text.strip() for block in output.blocks if hasattr(block, "text")]
    assert [part for part in texts if part] == ["And the time:"]
    started = [event.content_block for event in events if hasattr(event, "content_block")]
    assert all(not getattr(block, "text", "") for block in started)
    inputs = {event.index: "" for event in events if hasattr(event, "index")}
    for event in events:
        if hasattr(event, "delta"):
            inputs[event.index] += getattr(event.delta, "partial_json", "")
    assert [json.loads(part) for part in inputs.values() if part] == [{"rain": True}, {}]


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
def test_blocks_are_the_same_wherever_the_answer_is_cut(size):
    schemas = {"weather": TOOL["input_schema"], "now": NOW["input_schema"]}
    offer, output = OfferedTools([], schemas, {}, False, True), Output()
    reader = MessageReader(offer, formats.by_name("hermes", None))
    says = f"Hi {CALL}\nbye {CALL_NOW}{CALL}\nso"
    size = size or len(says)
    for at in range(0, len(says), size):
        output.take(reader.read(Piece(0, says[at : at + size])))
    output.take(reader.read(Piece(0, "", finish_reason="stop")))
    output.close()
    assert [getattr(b, "text", None) or (b.name, b.input) for b in output.blocks] == [
        "Hi", ("weather", {"rain": True}), "\nbye", ("now", {}), ("weather", {"rain": True}),
        "\nso",
    ]  # fmt: skip
