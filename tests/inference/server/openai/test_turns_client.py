"""Conversations by OpenAI's client: results of tools, and orders of messages that are errors."""

import contextlib
import functools
import re

import openai
import pytest

from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yo."}
SYSTEM, RULES = ({"role": "system", "content": text} for text in ("Be brief.", "Be polite."))
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Rome", "Oslo")
)


def calling(*ids: str | None) -> dict:
    function = {"name": "weather", "arguments": "{}"}
    named = ({} if id is None else {"id": id} for id in ids)
    calls = [{**name, "type": "function", "function": function} for name in named]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str | None, content: str = "4 degrees") -> dict:
    named = {} if id is None else {"tool_call_id": id}
    return {"role": "tool", "content": content, **named}


def ask(client, messages, **more):
    how = {"model": "fake", "messages": messages, "max_tokens": 200, "temperature": 0}
    return client.chat.completions.create(**how | more)


def error_of(client, messages, **more) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, messages, **more)
    assert "\n" not in raised.value.body["message"] and "Error" not in raised.value.body["message"]
    return raised.value


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_results_answer_calls_in_any_order(client, parrot, order):
    parrot.says = CALLS
    message = ask(client, [USER], tools=TOOLS).choices[0].message
    assert len(message.tool_calls) == 2
    results = [result(message.tool_calls[n].id, f"result {n}") for n in order]
    parrot.says = "Fine."
    assert ask(client, [USER, message, *results]).choices[0].message.content == "Fine."
    places = [parrot.prompt.index(f"result {n}") for n in order]
    assert places == sorted(places) and parrot.prompt.count("<tool_call>") == 2


@pytest.mark.parametrize("messages", [
    [USER, calling("a"), result("a"), ANSWER, USER, calling("b"), result("b")],
    [USER, calling("a"), result("a"), result("a", "and wind")],
    [USER, calling("a"), USER, result("a")],  # late
    [USER, calling("a", "b"), result(None), result(None)],  # their order says which
    [USER, calling("a"), USER],
    [SYSTEM, RULES, USER], [USER, SYSTEM, ANSWER, RULES], [ANSWER, USER], [USER, USER],
])  # fmt: skip
def test_orders_that_a_template_writes(client, parrot, messages):
    """Every text of them is in the prompt, in its order."""
    parrot.says = "Yes."
    assert ask(client, messages).choices[0].message.content == "Yes."
    place = 0
    for message in messages:
        place = parrot.prompt.index(message["content"] or "<tool_call>", place)


@pytest.mark.parametrize("messages, param, why", [
    ([result("a")], "messages[0].tool_call_id", "no earlier message has one"),
    ([USER, result(None)], "messages[1].tool_call_id", "no earlier message has one"),
    ([USER, result("a"), calling("a")], "messages[1].tool_call_id", "no earlier message has one"),
    ([USER, calling("a"), result("b")], "messages[2].tool_call_id", "no tool call .*: 'b'"),
    ([USER, calling("a"), result("a"), result("")], "messages[3].tool_call_id", "no tool call"),
    ([{**USER, "tool_calls": calling("a")["tool_calls"]}], "messages[0].tool_calls", "assistant"),
    ([{**USER, "tool_call_id": "a"}], "messages[0].tool_call_id", "role tool"),
    ([USER, {**calling(), "tool_calls": []}], "messages[1].content", "is required"),
    ([USER, {"role": "assistant"}], "messages[1].content", "is required"),
    ([{"role": "function", "name": "f", "content": "4"}], "messages[0].role", "one of .* tool"),
])  # fmt: skip
def test_messages_out_of_place_are_named(client, messages, param, why):
    error = error_of(client, messages)
    assert error.param == param and param in error.body["message"]
    assert re.search(why, error.body["message"])


def test_a_result_of_responses_without_its_call(client):
    item = {"type": "function_call_output", "call_id": "a", "output": "4"}
    call = {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"}
    for items, place in (([item], "input[0].call_id"), ([call, item], "input[1].call_id")):
        with pytest.raises(openai.BadRequestError, match="tool call") as raised:
            client.responses.create(model="fake", input=items)
        assert raised.value.param == place


@pytest.fixture(scope="module")
def of_family():
    """Returns the client of a server with a family's template, and its engine."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(family: str):
            engine = Parrot(TEMPLATES[family])
            engine.says = "Yes."
            url = f"{stack.enter_context(running(engine)).url}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            return stack.enter_context(client), engine

        yield start


@pytest.mark.parametrize("family, messages, why", [
    ("gemma", [SYSTEM, RULES, USER], "roles must alternate"),
    ("gemma", [USER, USER], "roles must alternate"),
    ("gemma", [ANSWER, USER], "roles must alternate"),
    ("gemma", [USER, ANSWER, ANSWER], "roles must alternate"),
    ("mistral", [SYSTEM, RULES, USER], r"messages\[0\] is a system message that the chat template"),
    ("tools", [USER, SYSTEM, ANSWER, RULES], r"messages\[1\] is a system message that"),
    ("llama3", [USER, calling("a", "b")], "One call at a time"),
])  # fmt: skip
def test_orders_that_a_template_rejects(of_family, family, messages, why):
    error = error_of(of_family(family)[0], messages)
    assert error.param == "messages" and re.search(why, error.body["message"])


@pytest.mark.parametrize("id, written", [
    ("call_0123456789abcdef", "[0-9a-f]{9}"), ("a2C4e6G8i", "a2C4e6G8i"), (None, "[0-9a-f]{9}"),
])  # fmt: skip
def test_calls_go_back_to_models_whose_ids_have_nine_characters(of_family, id, written):
    client, engine = of_family("mistral")
    assert ask(client, [USER, calling(id), result(id)]).choices
    assert re.search(f'"id": "{written}"', engine.prompt)
