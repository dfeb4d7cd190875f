"""POST /v1/messages, and the tokens of a conversation, as Anthropic's client asks."""

import asyncio
import dataclasses
import json

import anthropic
import pytest

from tests.inference.server.anthropic.asking import (
    ASKED,
    CALL,
    HOW,
    NOW,
    PATH,
    RESULT,
    SWITCH,
    TOOL,
    USE,
    assistant,
    text,
    turns,
    user,
)
from tests.inference.server.fake_engine import REPLY, TEMPLATE
from tests.inference.server.parrot import CONTEXT, TEMPLATES, Parrot
from tests.inference.server.running import running

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
REDACTED = {"type": "redacted_thinking", "data": "x"}
OTHER_USE = USE | {"id": "b"}
CALLED = '{"name": "weather", "arguments": {"rain": true}}'  # where a template has no calls
TWICE = f"[{CALLED}, {CALLED}]"
REASONS = TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}")


@pytest.fixture(scope="module")
def plain():
    """A server whose template writes roles and texts alone."""
    engine = Parrot()
    with running(engine) as engine.server:
        yield engine


def prompt_of(engine, **body):
    response = engine.server.post(PATH, **{"max_tokens": 1, "messages": ASKED} | body)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    return engine.prompt


def test_a_text_is_answered(client, parrot):
    message = client.messages.create(**HOW | {"max_tokens": 9})
    (block,) = message.content
    assert (block.type, block.text) == ("text", REPLY.encode()[:9].decode())
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_") and message._request_id
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(parrot.prompts[-1]), 9)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)


def test_the_model_may_end_its_turn(client, parrot):
    parrot.says = "Yes."
    message = client.messages.create(**HOW)
    assert message.stop_reason == "end_turn" and message.content[0].text == "Yes."
    parrot.says = ""
    message = client.messages.create(**HOW)
    assert message.stop_reason == "end_turn" and message.content == []


@pytest.mark.parametrize("system, expected", [
    ("Be brief.", "Be brief."), ([text("Be brief.")], "Be brief."),
    ([text("Be brief.", **CACHED), text("Be kind.")], "Be brief.\nBe kind."),
])  # fmt: skip
def test_a_system_prompt_comes_first(plain, system, expected):
    prompt = prompt_of(plain, system=system)
    assert prompt.startswith(turns(("system", expected), ("user", "Hi")))


@pytest.mark.parametrize("messages, expected", [
    ([user(text("a"))], [("user", "a")]), ([user(text("a"), text("b"))], [("user", "a\nb")]),
    ([user(text("a", **CACHED))], [("user", "a")]),
    ([*ASKED, {"role": "user", "content": "b"}], [("user", "Hi\nb")]),
    ([*ASKED, assistant(text("b")), user(text("c"))],
     [("user", "Hi"), ("assistant", "b"), ("user", "c")]),
    ([*ASKED, assistant(text("b")), assistant(text("c")), *ASKED],
     [("user", "Hi"), ("assistant", "b\nc"), ("user", "Hi")]),
    ([*ASKED, {"role": "system", "content": "c"}], [("user", "Hi"), ("system", "c")]),
    ([{"role": "system", "content": "c"}, *ASKED], [("system", "c"), ("user", "Hi")]),
    ([*ASKED, assistant(USE), user(RESULT, text("b"))],
     [("user", "Hi"), ("assistant", CALLED), ("tool", "wet"), ("user", "b")]),
    ([*ASKED, assistant(USE), user(RESULT | {"content": [text("wet"), text("cold")]})],
     [("user", "Hi"), ("assistant", CALLED), ("tool", "wet\ncold")]),
    ([*ASKED, assistant(USE), user(RESULT | {"is_error": True})],
     [("user", "Hi"), ("assistant", CALLED), ("tool", "Error:\nwet")]),
    ([*ASKED, assistant(USE), user({"type": "tool_result", "tool_use_id": "toolu_1"})],
     [("user", "Hi"), ("assistant", CALLED), ("tool", "")]),
    ([*ASKED, assistant(USE, OTHER_USE), user(RESULT | {"tool_use_id": "b"}), user(RESULT)],
     [("user", "Hi"), ("assistant", TWICE), ("tool", "wet"), ("tool", "wet")]),
    ([*ASKED, assistant(USE), assistant(OTHER_USE), user(RESULT, RESULT | {"tool_use_id": "b"})],
     [("user", "Hi"), ("assistant", TWICE), ("tool", "wet"), ("tool", "wet")]),
])  # fmt: skip
def test_turns_become_messages(plain, messages, expected):
    assert prompt_of(plain, messages=messages) == turns(*expected) + "<|start|>assistant\n"


@pytest.mark.parametrize("blocks, expected", [
    ([THOUGHT, text("b")], "Hm.|b"), ([REDACTED, text("b")], "|b"), ([THOUGHT], "Hm.|"),
    ([THOUGHT, THOUGHT, text("b")], "Hm.Hm.|b"),
])  # fmt: skip
def test_thoughts_of_earlier_turns_go_to_the_template(blocks, expected):
    engine = Parrot(REASONS)
    with running(engine) as engine.server:
        prompt = prompt_of(engine, messages=[*ASKED, assistant(*blocks), *ASKED])
        assert turns(("assistant", expected)) in prompt


def test_an_answer_goes_on_from_its_beginning(plain):
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    assert prompt_of(plain, messages=messages).endswith("<|start|>assistant\nIt is")


@pytest.mark.parametrize("thinking, expected", [
    (None, ""), ({"type": "adaptive"}, ""), ({"type": "enabled"}, "True"),
    ({"type": "disabled"}, "False"), ({"type": "adaptive", "display": "omitted"}, ""),
])  # fmt: skip
def test_thinking_is_a_variable_of_the_template(thinking, expected):
    engine = Parrot(SWITCH)
    with running(engine) as engine.server:
        assert prompt_of(engine, thinking=thinking).endswith(f"<|start|>assistant\n{expected}")
        variables = {"enable_thinking": "so"}  # comes first
        asked = {"thinking": {"type": "disabled"}, "chat_template_kwargs": variables}
        assert prompt_of(engine, **asked).endswith("so")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("says, thought, answer", [
    ("<think>\nTwo, ü.\n</think>\n\nFour.", "Two, ü.", "Four."), ("Four.", None, "Four."),
    (f"<think>{CALL}</think>{CALL}", CALL, None), ("<think>Two", "Two", None),
])  # fmt: skip
def test_a_thought_is_a_block(client, parrot, says, thought, answer, streams):
    parrot.says = says
    asked = HOW | {"tools": [TOOL], "max_tokens": len(says.encode()) + 1}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    *before, last = message.content
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    assert thoughts == [thought] * (thought is not None) and len(before) <= 1
    if answer:
        assert (last.type, last.text) == ("text", answer)
    else:
        assert last.type == ("tool_use" if says.endswith("</tool_call>") else "thinking")
    assert (message.usage.output_tokens_details.thinking_tokens > 0) is (thought is not None)
    again = [*ASKED, assistant(*message.content)]
    if last.type == "text":
        assert client.messages.create(**HOW | {"messages": [*again, *ASKED]}).content


def test_a_budget_bounds_a_thought(client, parrot):
    for kind, budget in (("enabled", 7), ("enabled", None), ("disabled", 7)):
        thinking = {"type": kind} | ({"budget_tokens": budget} if budget else {})
        client.messages.create(**HOW | {"thinking": thinking})
        assert parrot.params[-1].thinking_budget == (budget if kind == "enabled" else None)
    count = client.messages.count_tokens
    thinking = {"type": "enabled", "budget_tokens": 7}
    assert count(model="fake", messages=ASKED, thinking=thinking).input_tokens


def test_a_budget_needs_marks_of_thoughts():
    engine = Parrot(TEMPLATES["llama3"])
    with running(engine) as server:
        how = {"base_url": server.url, "api_key": "none", "max_retries": 0}
        thinking = {"type": "enabled", "budget_tokens": 7}
        with (
            anthropic.Anthropic(**how) as client,
            pytest.raises(anthropic.BadRequestError, match="thinking.budget_tokens needs a model"),
        ):
            client.messages.create(**HOW | {"thinking": thinking})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stops, expected", [
    (["two"], ("one ", "stop_sequence", "two")), (["x", "ne"], ("o", "stop_sequence", "ne")),
    (["four"], ("one two three", "end_turn", None)), ([], ("one two three", "end_turn", None)),
])  # fmt: skip
def test_stop_sequences_end_an_answer(client, parrot, stops, expected, streams):
    parrot.says = "one two three"
    asked = HOW | {"stop_sequences": stops}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == expected


def test_sampling_fields_reach_the_engine(client, parrot):
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 9, "seed": 7, "stop": ["x"]}
    client.messages.create(**HOW | {"max_tokens": 2, "extra_body": more})
    params = parrot.params[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 9)
    assert (params.seed, params.stop, params.max_new_tokens) == (7, ("x",), 2)
    client.messages.create(**HOW | {"max_tokens": 2, "extra_body": {}})
    assert parrot.params[-1].temperature == 1


def test_json_of_a_schema(client):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    (block,) = client.messages.create(**HOW | {"output_config": config}).content
    assert json.loads(block.text).keys() == {"a"}


def test_efforts_that_a_template_reads():
    engine = Parrot(TEMPLATE + "{{ reasoning_effort }}")
    with running(engine) as engine.server:
        assert prompt_of(engine, output_config={"effort": "low"}).endswith("low")
        assert prompt_of(engine, reasoning_effort="high").endswith("high")


def test_fields_without_effect(perch, client):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": edits,
        "tools": [TOOL | CACHED | {"type": "custom", "strict": True}],
    } | CACHED  # fmt: skip
    response = perch.post(PATH, max_tokens=1, messages=ASKED, **asked)
    assert response.status_code == 200 and "x-ignored-params" not in response.headers
    response = perch.post(PATH, max_tokens=1, messages=ASKED, inference_geo="eu", unheard_of=1)
    assert response.headers["x-ignored-params"] == "inference_geo, unheard_of"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2026-01-01"}
    assert client.messages.create(**HOW, extra_headers=headers).content
    assert perch.http.post(PATH, json={"max_tokens": 1, "messages": ASKED}).status_code == 200


def test_the_context_ends_an_answer(client):
    message = client.messages.create(**HOW | {"max_tokens": CONTEXT})
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + message.usage.output_tokens == CONTEXT


class _Caches(Parrot):
    def _advance(self, each):
        return dataclasses.replace(super()._advance(each), num_cached_tokens=16)


def test_cached_tokens_are_not_counted_as_input():
    engine = _Caches()
    with running(engine) as server:
        how = {"base_url": server.url, "api_key": "none"}
        with anthropic.Anthropic(**how) as client:
            whole = client.messages.create(**HOW | {"max_tokens": 3})
            with client.messages.stream(**HOW | {"max_tokens": 3}) as stream:
                streamed = stream.get_final_message()
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens == len(engine.prompts[-1]) - 16
        assert usage.cache_read_input_tokens == 16 and usage.output_tokens == 3


def test_many_at_once_by_the_asynchronous_client(perch, parrot):
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=perch.url, api_key="none") as client:
            asked = [client.messages.create(**HOW | {"max_tokens": 4}) for _ in range(8)]
            return await asyncio.gather(*asked)

    messages = asyncio.run(ask())
    assert {message.content[0].text for message in messages} == {"Grü"}
    assert len({message.id for message in messages}) == 8


# --- count_tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [
    {}, {"system": "Be brief."}, {"tools": [TOOL, NOW]}, {"thinking": {"type": "disabled"}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"tools": [TOOL], "messages": [*ASKED, assistant(USE), user(RESULT)]},
])  # fmt: skip
def test_counts_are_those_of_messages(client, asked):
    conversation = {"model": "fake", "messages": ASKED} | asked
    count = client.messages.count_tokens(**conversation).input_tokens
    message = client.messages.create(**conversation, max_tokens=1)
    assert count == message.usage.input_tokens > 0


def test_a_count_may_exceed_the_context(client):
    long = [user(text("a" * CONTEXT))]
    assert client.messages.count_tokens(model="fake", messages=long).input_tokens > CONTEXT
    with pytest.raises(anthropic.BadRequestError, match=f"messages: .* {CONTEXT} tokens"):
        client.messages.create(**HOW | {"messages": long})
