"""Thoughts of answers, as OpenAI's client reads them and otherwise."""

import json

import openai
import pytest

from inference.text import thoughts
from inference.text.thoughts import Marks
from tests.inference.server import events
from tests.inference.server.fake_engine import MAX_CONTEXT, FakeEngine
from tests.inference.server.parrot import CONTEXT, TEMPLATES, Control, Parrot
from tests.inference.server.running import running
from tests.inference.server.test_bad_input import error_of

CHAT = "/v1/chat/completions"
THINKS = TEMPLATES["qwen"]
OPENS = THINKS + "{{ '<think>\n' }}"
CLOSES = THINKS + "{{ '<think>\n\n</think>\n\n' }}"
ASKED = [{"role": "user", "content": "2 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
# What the model says after a prompt that does or does not open the thought: it, and the answer.
SAID = [
    (THINKS, "<think>\nTwo, ü.\n</think>\n\nFour.", "Two, ü.", "Four."),
    (OPENS, "Two, ü.\n</think>\n\nFour.", "Two, ü.", "Four."),
    (CLOSES, "<think>Four.", None, "<think>Four."),
    (THINKS, "Four.", None, "Four."),
    (OPENS, "cut off \n", "cut off", ""),
    (TEMPLATES["llama3"], "<think>a</think>b", None, "<think>a</think>b"),
    (THINKS, f"<think>{CALL}</think>Four.", CALL, "Four."),
]  # fmt: skip


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("template, says, thought, answer", SAID)
def test_a_thought_is_apart(template, says, thought, answer):
    engine = Parrot(template)
    engine.says = says
    with running(engine) as server, client_of(server) as client:
        how = {"model": "fake", "messages": ASKED, "max_tokens": len(says.encode()) + 5}
        for more in ({}, {"tools": [TOOL]}):
            found = client.chat.completions.create(**how, **more)
            message = found.choices[0].message
            assert (message.content, getattr(message, "reasoning", None)) == (answer, thought)
            assert getattr(message, "reasoning_content", None) == thought
            details = found.usage.completion_tokens_details
            assert (details.reasoning_tokens > 0) is (thought is not None)
            text, whole = "", ""
            with client.chat.completions.create(**how, **more, stream=True) as stream:
                for chunk in stream:
                    for delta in (choice.delta for choice in chunk.choices):
                        assert not (text and getattr(delta, "reasoning", None))
                        text += delta.content or ""
                        whole += getattr(delta, "reasoning_content", None) or ""
            assert (text, whole or None) == (answer, thought)


def test_marks_that_are_special_tokens(monkeypatch):
    """As Gemma's, here those of gaps; other special tokens stay out of the text."""
    marks = Marks("<fim_prefix>thought", "<fim_suffix>")
    monkeypatch.setattr(thoughts, "MARKS", (marks,))
    engine = Control(THINKS.replace("<think>", marks.opening).replace("</think>", marks.closing))
    engine.says = "<fim_prefix>thought\nTwo.<fim_suffix>Fo<fim_pad>ur."
    with running(engine) as server, client_of(server) as client:
        how = {"model": "fake", "messages": ASKED, "max_tokens": 40}
        answer = client.chat.completions.create(**how)
        message = answer.choices[0].message
        assert (message.content, message.reasoning) == ("Four.", "Two.")
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("\nTwo.")
        assert len(engine.params[-1].shown_special_ids) == 2 and engine.params[-1].thinks


def test_its_tokens_are_counted_and_bounded():
    engine = Parrot(OPENS)
    engine.says = "Two.</think>Four."  # a token a byte
    with running(engine) as server:
        body = {"messages": ASKED, "max_tokens": 30, "thinking_token_budget": 7, "n": 2}
        usage = server.post(CHAT, **body).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}  # of two answers
        assert engine.params[-1].thinking_budget == 7 and engine.params[-1].thinks
        server.post(CHAT, messages=ASKED, thinking_budget_tokens=3)
        assert engine.params[-1].thinking_budget == 3
        for nothing in (None, -1):
            server.post(CHAT, messages=ASKED, reasoning_budget_tokens=nothing)
            assert engine.params[-1].thinking_budget is None


@pytest.mark.parametrize("field, value, content, thought", [
    ("include_reasoning", False, "Four.", None), ("include_reasoning", True, "Four.", "Two."),
    ("separate_reasoning", False, "<think>Two.</think>Four.", None),
    ("reasoning_format", "none", "<think>Two.</think>Four.", None),
    ("reasoning_format", "deepseek", "Four.", "Two."),
])  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_what_becomes_of_it(field, value, content, thought, streams):
    engine = Parrot(THINKS)
    engine.says = "<think>Two.</think>Four."
    with running(engine) as server:
        body = {"messages": ASKED, "stream": streams, field: value, "max_tokens": 40}
        response = server.post(CHAT, **body)
        if not streams:
            message = response.json()["choices"][0]["message"]
            assert (message["content"], message.get("reasoning")) == (content, thought)
            return
        deltas = [choice["delta"] for choice in events.choices(events.read(response.text))]
        assert "".join(delta.get("content") or "" for delta in deltas) == content
        assert "".join(delta.get("reasoning", "") for delta in deltas) == (thought or "")


def test_calls_come_behind_it():
    """And those within it are no calls; a forced one is of the grammar behind it."""
    engine = Parrot(OPENS)
    engine.says = f"Or {CALL}?</think>\n{CALL}"
    with running(engine) as server, client_of(server) as client:
        for choice in ("auto", "required"):
            found = client.chat.completions.create(
                model="fake", messages=ASKED, tools=[TOOL], tool_choice=choice
            )
            message = found.choices[0].message
            assert [call.function.name for call in message.tool_calls] == ["add"]
            assert found.choices[0].finish_reason == "tool_calls" and message.content is None
            if choice == "auto":
                assert message.reasoning == f"Or {CALL}?"
            assert engine.params[-1].thinks and (engine.params[-1].grammar is None) is (
                choice == "auto"
            )


@pytest.mark.parametrize("template, budget, message", [
    (TEMPLATES["llama3"], 5, "needs a model whose chat template marks thoughts"),
    (THINKS, CONTEXT + 1, f"is at most the context of {CONTEXT} tokens"),
])  # fmt: skip
def test_a_budget_that_bounds_nothing(template, budget, message):
    with running(Parrot(template)) as server:
        response = server.post(CHAT, messages=ASKED, thinking_token_budget=budget)
        error = error_of(response, 400)
        assert error["param"] == "thinking_token_budget" and message in error["message"]


@pytest.mark.parametrize("begun, says, thought, answer", [
    ("<think>\nfoo", "bar</think>Four.", "bar", "Four."),
    ("x ", "<think>a</think>", None, "<think>a</think>"),
    ("<think>a</think>", "Four.", None, "Four."),
    ([{"type": "text", "text": "<think>"}], "a</think>b", "a", "b"),
])  # fmt: skip
def test_a_message_that_goes_on(begun, says, thought, answer):
    engine = Parrot(THINKS)
    engine.says = says
    asked = {
        "messages": [*ASKED, {"role": "assistant", "content": begun}],
        "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip
    with running(engine) as server:
        message = server.post(CHAT, **asked).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning")) == (answer, thought)
        response = server.post(CHAT, **asked, thinking_token_budget=1)
        if begun == "<think>\nfoo":
            assert "the beginning of a thought" in error_of(response, 400)["message"]
        else:
            assert response.status_code == 200


def test_words_that_no_thought_holds_either():
    engine = Parrot(THINKS)
    engine.says = "<think>a</think>b"
    with running(engine) as server:
        server.post(CHAT, messages=ASKED, bad_words=["x"])
        assert engine.params[-1].grammar and not engine.params[-1].thinks
        server.post(CHAT, messages=ASKED, bad_words=["x"], thinking_token_budget=9)
        assert engine.params[-1].grammar and engine.params[-1].thinks


def test_other_bodies_have_no_thoughts():
    with running(FakeEngine()) as server:
        for path, fields in (
            ("/v1/completions", {"prompt": "a", "thinking_token_budget": 5}),
            ("/v1/completions", {"prompt": "a", "reasoning_budget_tokens": 5}),
            ("/v1/embeddings", {"input": "a", "separate_reasoning": False}),
            ("/v1/responses", {"input": "a", "include_reasoning": False}),
        ):
            error = error_of(server.post(path, **fields), 400)
            assert error["code"] == "unsupported" and error["param"] in fields
    assert MAX_CONTEXT


@pytest.mark.parametrize("template, says, thought, answer", SAID[:5])
def test_responses_have_an_item_of_it(template, says, thought, answer):
    engine = Parrot(template)
    engine.says = says
    how = {"model": "fake", "input": "2 + 2?", "max_output_tokens": len(says.encode()) + 5}
    with running(engine) as server, client_of(server) as client:
        found = client.responses.create(**how)
        kinds = ["reasoning"] * (thought is not None) + ["message"]
        assert [item.type for item in found.output] == kinds and found.output_text == answer
        if thought is not None:
            assert found.output[0].content[0].text == thought
            assert found.usage.output_tokens_details.reasoning_tokens > 0
        text = whole = ""
        with client.responses.stream(**how) as stream:
            for event in stream:
                whole += event.delta if event.type == "response.reasoning_text.delta" else ""
                text += event.delta if event.type == "response.output_text.delta" else ""
            last = stream.get_final_response()
        assert (text, whole or None) == (answer, thought)
        assert [item.type for item in last.output] == kinds


def test_an_earlier_thought_goes_back_into_the_prompt():
    """As an item of an earlier answer, and as a field of an earlier message."""
    engine = Parrot("{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}"
                    "{% endfor %}{# <think></think> #}")  # fmt: skip
    engine.says = "<think>Two.</think>Four."
    with running(engine) as server, client_of(server) as client:
        first = client.responses.create(model="fake", input="2 + 2?")
        items = [{"role": "user", "content": "2 + 2?"}, *first.output]
        items = [item if isinstance(item, dict) else item.model_dump() for item in items]
        client.responses.create(model="fake", input=[*items, {"role": "user", "content": "Sure?"}])
        assert "assistant:Two.:Four." in engine.prompt
        client.responses.create(model="fake", input=[items[0], items[1], *items[1:]])
        assert "assistant:Two.\n\nTwo.:Four." in engine.prompt
        message = {"role": "assistant", "content": "Four.", "reasoning_content": "Two."}
        server.post(CHAT, messages=[*ASKED, message, {"role": "user", "content": "Sure?"}])
        assert "assistant:Two.:Four." in engine.prompt


def test_the_answer_of_a_schema_follows_it():
    engine = Parrot(OPENS)
    schema = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with running(engine) as server, client_of(server) as client:
        found = client.chat.completions.create(
            model="fake", messages=ASKED, response_format=form, max_tokens=60
        )
        assert json.loads(found.choices[0].message.content) == {"n": 4}
