"""Tools by OpenAI's client: whole, streamed, read by its helpers, and a whole conversation."""

import json
from enum import StrEnum

import openai
import pydantic
import pytest

ASKED = [{"role": "user", "content": "How is it in Zürich?"}]
CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
OTHER = {"type": "function", "function": {"name": "now"}}
HOW = {"model": "fake", "messages": ASKED, "temperature": 0, "tools": [TOOL, OTHER]}
ARGUMENTS = '{"city": "Zürich 🙂"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Unit(StrEnum):
    C = "celsius"
    K = "kelvin"


class Weather(pydantic.BaseModel):
    """The weather at a place."""

    city: str
    days: int
    unit: Unit
    more: list[str]


class Answer(pydantic.BaseModel):
    """What was found."""

    text: str
    is_sure: bool
    weather: Weather | None


@pytest.fixture
def create(client):
    def ask(**asked):
        return client.chat.completions.create(**HOW | asked)

    return ask


def test_a_call(create, parrot):
    parrot.says = CALL
    (choice,) = create().choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "weather" and call.function.arguments == ARGUMENTS


def test_text_and_several_calls(create, parrot):
    parrot.says = f"Let me see.\n{CALL}\n{NOW}"
    message = create().choices[0].message
    assert message.content == "Let me see."
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
    assert len({call.id for call in message.tool_calls}) == 2
    assert len(create(parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_no_call(create, parrot):
    parrot.says = "It is cold."
    (choice,) = create(tool_choice="auto").choices
    assert choice.message.content == "It is cold." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    parrot.says = CALL
    (choice,) = create(tool_choice="none").choices
    assert choice.message.content == CALL and choice.message.tool_calls is None


def test_a_streamed_call(create, parrot):
    parrot.says = f"Well. {CALL}\n{NOW}"
    calls, text, reason = {}, "", None
    for chunk in create(stream=True):
        (choice,) = chunk.choices
        text, reason = text + (choice.delta.content or ""), choice.finish_reason
        for call in choice.delta.tool_calls or ():
            if call.index in calls:
                assert call.id is None and call.function.name is None
                calls[call.index][2] += call.function.arguments
            else:
                calls[call.index] = [call.id, call.function.name, call.function.arguments]
    assert text == "Well." and reason == "tool_calls" and sorted(calls) == [0, 1]
    assert [call[1:] for call in calls.values()] == [["weather", ARGUMENTS], ["now", "{}"]]


def test_several_answers_call_each(create, parrot):
    parrot.says = CALL
    found = create(n=2)
    assert len({choice.message.tool_calls[0].id for choice in found.choices}) == 2
    indices = [
        c.choices[0].index for c in create(n=2, stream=True) if c.choices[0].delta.tool_calls
    ]
    assert set(indices) == {0, 1}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "function": {"name": "weather"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "weather"}}]}},
])  # fmt: skip
def test_a_call_that_has_to_come(client, choice, streams):
    how = HOW | {"tools": [TOOL], "tool_choice": choice}
    if streams:
        with client.chat.completions.stream(**how) as stream:
            found = stream.get_final_completion()
    else:
        found = client.chat.completions.create(**how)
    call = found.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments).keys() == {
        "city"
    }


def test_arguments_are_parsed(client):
    tool = openai.pydantic_function_tool(Weather)
    found = client.chat.completions.parse(**HOW | {"tools": [tool], "tool_choice": "required"})
    parsed = found.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Weather) and parsed.unit in Unit


def test_arguments_are_parsed_from_a_stream(client, parrot):
    given = Weather(city="Zürich", days=2, unit=Unit.K, more=["a", "b"])
    parrot.says = (
        f'<tool_call>{{"name": "Weather", "arguments": {given.model_dump_json()}}}</tool_call>'
    )
    tool, deltas, done = openai.pydantic_function_tool(Weather), [], []
    with client.chat.completions.stream(**HOW | {"tools": [tool]}) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas.append(event.arguments_delta)
            if event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
        final = stream.get_final_completion()
    assert done == [given] and len(deltas) > 10
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == given


def test_a_conversation_with_a_tool(client, create, parrot):
    parrot.says = CALL
    message = create().choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
    parrot.says = "It is 4 degrees."
    found = create(messages=[*ASKED, message, result])
    assert found.choices[0].message.content == "It is 4 degrees."
    assert CALL in parrot.prompt
    assert "<tool_response>\n4 degrees\n</tool_response>" in parrot.prompt


def test_an_answer_is_parsed(client):
    found = client.chat.completions.parse(model="fake", messages=ASKED, response_format=Answer)
    message = found.choices[0].message
    assert isinstance(message.parsed, Answer)
    assert Answer.model_validate_json(message.content) == message.parsed


def test_a_streamed_answer_is_parsed(client):
    how = {"model": "fake", "messages": ASKED, "response_format": Answer}
    with client.chat.completions.stream(**how) as stream:
        done = [event.parsed for event in stream if event.type == "content.done"]
    assert len(done) == 1 and isinstance(done[0], Answer)


def test_a_schema_and_any_object(client):
    schema = {"name": "x", "strict": True, "schema": CITY}
    for form in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
        found = client.chat.completions.create(model="fake", messages=ASKED, response_format=form)
        assert isinstance(json.loads(found.choices[0].message.content), dict)


def test_tools_beside_a_schema(client):
    tools = [openai.pydantic_function_tool(Weather)]
    found = client.chat.completions.parse(
        model="fake", messages=ASKED, response_format=Answer, tools=tools
    )
    message = found.choices[0].message
    assert (message.parsed is None) == bool(message.tool_calls)


def test_an_answer_that_is_cut_off_is_an_error_of_the_helper(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="fake", messages=ASKED, response_format=Answer, max_tokens=3
        )


@pytest.mark.parametrize("asked, param", [
    ({"tools": []}, "tools"), ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}],
      "tool_choice": "required"}, "tools[0].function.parameters"),
])  # fmt: skip
def test_what_is_wrong_is_named(create, asked, param):
    with pytest.raises(openai.BadRequestError) as found:
        create(**asked)
    assert found.value.param == param and found.value.type == "invalid_request_error"
