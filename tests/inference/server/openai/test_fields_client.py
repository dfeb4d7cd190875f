"""Thoughts, budgets, votes and gaps by OpenAI's client: what vLLM and others added to its API."""

import openai
import pytest

from tests.inference.server.fake_engine import reply
from tests.inference.server.parrot import CONTEXT, TEMPLATES, Parrot
from tests.inference.server.running import running
from tests.inference.server.test_infill import Marked

ASKED = [{"role": "user", "content": "2 + 2?"}]
HOW = {"model": "fake", "messages": ASKED, "max_tokens": 60}
SAYS = "<think>\nTwo, ü.\n</think>\n\nFour."
TEXT = bytes(reply(99)).decode(errors="ignore")
BUDGET = "thinking_token_budget"


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def read_chat(client) -> tuple[str, str]:
    message = client.chat.completions.create(**HOW).choices[0].message
    return message.reasoning, message.content


def read_chat_stream(client) -> tuple[str, str]:
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**HOW, stream=True)
    ]
    thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    return thought, "".join(delta.content or "" for delta in deltas)


def read_response(client) -> tuple[str, str]:
    response = client.responses.create(model="fake", input="2 + 2?")
    return response.output[0].content[0].text, response.output_text


def read_response_stream(client) -> tuple[str, str]:
    texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for event in client.responses.create(model="fake", input="2 + 2?", stream=True):
        if event.type in texts:
            texts[event.type] += event.delta
    return tuple(texts.values())


@pytest.mark.parametrize("read", [read_chat, read_chat_stream, read_response, read_response_stream])
def test_a_thought_is_apart(client, parrot, read):
    parrot.says = SAYS
    assert read(client) == ("Two, ü.", "Four.")


@pytest.mark.parametrize("effort, thinks", [("none", False), ("medium", True), (None, True)])
@pytest.mark.parametrize("path", ["chat", "responses"])
def test_an_effort_turns_thoughts_on_and_off(client, parrot, path, effort, thinks):
    parrot.says = "Four."
    if path == "chat":
        client.chat.completions.create(**HOW, reasoning_effort=effort)
    else:
        client.responses.create(model="fake", input="2 + 2?", reasoning={"effort": effort})
    assert parrot.prompt.endswith("<think>\n\n</think>\n\n") is not thinks


def test_an_effort_that_a_template_reads():
    engine = Parrot(TEMPLATES["qwen"] + "{{ reasoning_effort }}")
    with running(engine) as server, client_of(server) as client:
        for effort in ("minimal", "low", "high"):
            client.chat.completions.create(**HOW, reasoning_effort=effort)
            assert engine.prompt.endswith(effort)


@pytest.mark.parametrize("field, value, budget", [
    (BUDGET, 7, 7), (BUDGET, 0, 0), (BUDGET, CONTEXT, CONTEXT), (BUDGET, None, None),
    ("thinking_budget_tokens", 7, 7), ("reasoning_budget_tokens", -1, None),
])  # fmt: skip
def test_budgets(client, parrot, field, value, budget):
    parrot.says = SAYS
    client.chat.completions.create(**HOW, extra_body={field: value})
    assert parrot.params[-1].thinking_budget == budget and parrot.params[-1].thinks
    client.responses.create(model="fake", input="2 + 2?", extra_body={field: value})
    assert parrot.params[-1].thinking_budget == budget


@pytest.mark.parametrize("more", [{"n": 1}, {"n": 2, "temperature": 1}])
def test_answers_vote(client, parrot, more):
    extra = {"best_of": 4, "vote": True}
    client.chat.completions.create(**HOW, **more, extra_body=extra)
    client.completions.create(model="fake", prompt="2 + 2?", **more, extra_body=extra)
    for params in parrot.params[-2:]:
        assert (params.best_of, params.vote, params.n) == (4, True, more["n"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("more, expected", [
    ({}, "<fim_prefix>f(<fim_suffix>)<fim_middle>"),
    ({"suffix_first": False}, "<fim_prefix>f(<fim_suffix>)<fim_middle>"),
    ({"suffix_first": True}, "<fim_prefix><fim_suffix>)<fim_middle>f("),
])  # fmt: skip
def test_a_gap_is_filled(client, parrot, streams, more, expected):
    how = {"model": "fake", "prompt": "f(", "suffix": ")", "max_tokens": 9, "temperature": 0}
    answer = client.completions.create(**how, extra_body=more, stream=streams)
    pieces = [chunk.choices[0] for chunk in (answer if streams else [answer])]
    assert "".join(piece.text for piece in pieces) == TEXT[:7]  # nine bytes
    assert pieces[-1].finish_reason == "length" and parrot.prompt == expected


CHATS, TEXTS, RESPONSES = (
    lambda client, fields: client.chat.completions.create(**HOW, extra_body=fields),
    lambda client, fields: client.completions.create(
        **{"model": "fake", "prompt": "f(", "extra_body": fields}
    ),
    lambda client, fields: client.responses.create(model="fake", input="a", extra_body=fields),
)
SCHEMA = {"type": "object", "properties": {"a": {"$dynamicRef": "#x"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("send, fields, param, why", [
    (CHATS, {BUDGET: CONTEXT + 1}, BUDGET, f"at most the context of {CONTEXT} tokens"),
    (RESPONSES, {BUDGET: CONTEXT + 1}, BUDGET, f"at most the context of {CONTEXT} tokens"),
    (CHATS, {"thinking_budget_tokens": CONTEXT + 1}, "thinking_budget_tokens", "at most the"),
    (CHATS, {BUDGET: -2}, BUDGET, "from 0"), (CHATS, {BUDGET: "7"}, BUDGET, "a whole number"),
    (TEXTS, {BUDGET: 7}, BUDGET, "is a field of chats"),
    (CHATS, {"reasoning_effort": "low"}, "reasoning_effort", "is not read by this model's"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", "is not read by this"),
    (CHATS, {"reasoning_effort": "most"}, "reasoning_effort", "most"),
    (CHATS, {"vote": True}, "vote", "best_of"), (TEXTS, {"vote": True}, "vote", "best_of"),
    (CHATS, {"best_of": 1, "n": 2}, "n", "best_of=1"), (TEXTS, {"best_of": 99}, "best_of", "up to"),
    (CHATS, {"response_format": FORM}, "response_format", r"\$dynamicRef"),
    (TEXTS, {"response_format": FORM}, "response_format", r"\$dynamicRef"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
     "text.format", r"\$dynamicRef"),
    (TEXTS, {"suffix": ")", "echo": True}, "suffix", "echo"),
    (TEXTS, {"suffix": 3}, "suffix", "a text"), (CHATS, {"suffix": ")"}, "suffix", "completion"),
    (TEXTS, {"suffix_first": True}, "suffix_first", "suffix"),
])  # fmt: skip
def test_what_cannot_be_obeyed_is_named(client, send, fields, param, why):
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        send(client, fields)
    error = raised.value
    assert error.param == param and error.type == "invalid_request_error"
    assert "\n" not in error.body["message"]


def test_a_model_without_marks_for_gaps():
    with running(Marked("<a>", "<b>", "<c>", "<d>")) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="no fill-in-the-middle tokens") as raised:
            client.completions.create(model="fake", prompt="f(", suffix=")")
        assert (raised.value.param, raised.value.code) == ("suffix", "unsupported")
