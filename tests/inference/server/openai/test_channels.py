"""Answers on channels (gpt-oss), as clients of three APIs read them."""

import json

import anthropic
import openai
import pytest

from tests.inference.server import events
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running
from tests.inference.server.test_tools import streamed, tool
from tests.inference.text import harmony

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is it cold in Zürich?"}]
ARGUMENTS = '{"city": "Zürich"}'
CITY = {"type": "object", "properties": {"city": {"enum": ["Zürich"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [tool("weather", CITY), tool("now", None, description="The time")]
NEXT = "<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Two, ü.\n"
FINAL = "<|channel|>final<|message|>Yes."
PLAN = "<|channel|>commentary<|message|>Let me see."
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
IN_ROLE = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}"
OTHER = CALL.replace("weather", "nope")
CALLED = [("weather", ARGUMENTS)]
SAID = {
    "answer": (THINK + NEXT + FINAL, "Two, ü.", "Yes.", []),
    "no thought": (FINAL, None, "Yes.", []), "cut off": (THINK, "Two, ü.", "", []),
    "call": (THINK + NEXT + CALL, "Two, ü.", None, CALLED),
    "call by its role": (THINK + NEXT + IN_ROLE, "Two, ü.", None, CALLED),
    "plan, then call": (THINK + NEXT + PLAN + NEXT + CALL, "Two, ü.", "Let me see.", CALLED),
    "thoughts around a plan": (THINK + NEXT + PLAN + NEXT + THINK + NEXT + FINAL,
                               "Two, ü.\n\nTwo, ü.", "Let me see.\n\nYes.", []),
    "two calls": (CALL + "<|call|><|start|>assistant" + IN_ROLE, None, None, CALLED * 2),
    "no such function": (OTHER, None, OTHER, []),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return Parrot(TEMPLATES["harmony"])


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as one:
        yield one


@pytest.fixture
def say(engine, server):
    def ask(says=None, **asked):
        engine.says = says
        asked = {"messages": ASKED, "max_tokens": 2000} | asked
        response = server.post(CHAT, **asked)
        assert response.status_code == 200, response.text
        assert "x-unread-tool-format" not in response.headers
        return response.json()["choices"][0]["message"] | {"usage": response.json()["usage"]}

    return ask


def called(message) -> list:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("name", SAID)
def test_thoughts_texts_and_calls_are_apart(say, server, engine, name):
    says, thought, content, calls = SAID[name]
    message = say(says, tools=TOOLS)
    assert (message.get("reasoning"), message["content"]) == (thought, content)
    assert message.get("reasoning_content") == thought and called(message) == calls
    num = message["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num == says.count(THINK) * len(b"Two, \xc3\xbc.\n")
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 2000, "stream": True}
    pieces = events.choices(events.read(server.post(CHAT, **body).text))
    choice = streamed(pieces)
    assert (choice["message"]["content"] or "") == (content or "")
    assert called(choice["message"]) == calls
    assert "".join(p["delta"].get("reasoning", "") for p in pieces) == (thought or "")
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", SAID)
def test_responses_have_items_in_order(server, engine, name):
    says, thought, content, calls = SAID[name]
    engine.says = says
    given = [{"type": "function", **one["function"]} for one in TOOLS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        how = {"model": "fake", "input": "Is it?", "tools": given, "max_output_tokens": 2000}
        found = client.responses.create(**how)
        kinds = [item.type for item in found.output]
        with client.responses.stream(**how) as stream:
            assert [item.type for item in _last(stream).output] == kinds
    if name == "thoughts around a plan":
        assert kinds == ["reasoning", "message"] * 2
    thoughts = [item.content[0].text for item in found.output if item.type == "reasoning"]
    assert "".join(thoughts) == (thought or "") and found.output_text == (content or "")
    functions = [item for item in found.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in functions] == calls


def _last(stream):
    for _ in stream:
        pass
    return stream.get_final_response()


def test_messages_have_blocks_in_order(server, engine):
    engine.says = SAID["plan, then call"][0]
    given = [{"name": "weather", "input_schema": CITY}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        found = client.messages.create(model="fake", messages=ASKED, tools=given, max_tokens=2000)
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert found.content[0].thinking == "Two, ü." and found.content[2].input == {"city": "Zürich"}


def test_thoughts_stay_where_a_request_wants_them(say):
    says = THINK + NEXT + PLAN + NEXT + CALL
    message = say(says, tools=TOOLS, separate_reasoning=False)
    raw = (THINK + NEXT + PLAN).removesuffix("\n")
    assert message["content"].startswith(raw) and called(message) == CALLED
    message = say(THINK + NEXT + FINAL, include_reasoning=False)
    assert message["content"] == "Yes." and "reasoning" not in message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_is_forced_in_the_native_form(say, engine, choice):
    message = say(tools=TOOLS, tool_choice=choice)
    ((name, arguments),) = called(message)
    assert message["content"] is None
    assert json.loads(arguments) == ({} if name == "now" else {"city": "Zürich"})
    params = engine.params[-1]
    assert params.thinks and "<|channel|>commentary to=" in params.grammar.replace("\\", "")


def test_an_answer_of_a_schema_is_a_message(say, engine):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    message = say(response_format=form)
    assert json.loads(message["content"]) == {"city": "Zürich"} and engine.params[-1].thinks
    message = say(response_format=form, tools=TOOLS)
    assert called(message) or json.loads(message["content"]) == {"city": "Zürich"}
    assert engine.params[-1].thinks


def test_a_header_at_the_end_of_a_prompt_is_not_written_again():
    template = "{{ messages[0].content }}<|start|>assistant<|channel|>final<|message|>"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    with running(Parrot(template)) as server:
        response = server.post(CHAT, messages=ASKED, max_tokens=200, response_format=form)
    (choice,) = response.json()["choices"]
    assert json.loads(choice["message"]["content"]) == {"city": "Zürich"}


def test_budget_and_effort(say, engine):
    say(THINK + NEXT + FINAL, thinking_token_budget=7, reasoning_effort="high")
    params = engine.params[-1]
    assert params.thinks and params.thinking_budget == 7
    assert "Reasoning: high\n" in engine.prompt and engine.prompt.endswith("<|start|>assistant")
    say(FINAL, reasoning_effort="low")
    assert "Reasoning: low\n" in engine.prompt


def test_a_message_goes_on_without_a_header(say, server, engine):
    begun = [*ASKED, {"role": "assistant", "content": "Yes, "}]
    message = say("it is.", messages=begun, continue_final_message=True)
    assert message["content"] == "it is." and "reasoning" not in message
    assert engine.prompt.endswith("<|channel|>final<|message|>Yes, ")
    asked = {"messages": begun, "continue_final_message": True, "thinking_token_budget": 3}
    assert server.post(CHAT, **asked).status_code == 200
    assert engine.params[-1].thinking_budget is None


def calling(*ids, **more):
    calls = [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in ids]
    return {"role": "assistant", "tool_calls": calls} | more


def test_earlier_turns(say, engine):
    """Each call is followed by its result, and a thought is before the first."""
    turns = [
        *ASKED, calling(("1", "weather"), ("2", "now"), content="Look.", reasoning_content="Hm."),
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": "4 <|end|> degrees"},
    ]  # fmt: skip
    say(FINAL, messages=turns, tools=TOOLS)
    earlier = engine.prompt.partition("Zürich?")[2]
    assert earlier == (
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\n\nLook.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"4 <|end|> degrees"'
        "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
        "<|start|>assistant"
    )
    assert "type now = (" in engine.prompt and "// \ntype weather" in engine.prompt
    say(FINAL, messages=[*turns, {"role": "assistant", "content": "Cold."}, *ASKED])
    assert "<|start|>assistant<|channel|>final<|message|>Cold.<|end|>" in engine.prompt


def test_marks_that_are_special_tokens_are_shown(say, engine):
    say(FINAL)
    known = {"<|start|>", "<|end|>"}  # of the tokenizer here
    assert known < {*harmony.MARKS} and engine.params[-1].shown_special_ids == (256, 257)
