"""POST /v1/chat/completions: the role, the conversation, both kinds of pieces."""

import pytest

from tests.inference.server import events
from tests.inference.server.fake_engine import END, MAX_CONTEXT, START, reply

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Hi"}]


def say(n, **how):
    return bytes(reply(n, **how)).decode(errors="replace")


def conversation(*turns):
    """Token ids of what the template makes of them."""
    ids = []
    for role, text in turns:
        ids += [START, *f"{role}\n{text}".encode(), END]
    return [*ids, START, *b"assistant\n"]


def answered(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_what_clients_read(server):
    given = answered(server.post(CHAT, messages=ASKED, max_tokens=8))
    assert given["id"].startswith("chatcmpl-") and given["object"] == "chat.completion"
    (choice,) = given["choices"]
    assert choice["message"] == {"role": "assistant", "content": say(8), "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert given["usage"]["prompt_tokens"] == len(conversation(("user", "Hi")))


@pytest.mark.parametrize("messages, expected", [
    (ASKED, [("user", "Hi")]),
    ([{"role": "developer", "content": "Be"}, *ASKED], [("system", "Be"), ("user", "Hi")]),
    ([{"role": "user", "content": [{"type": "text", "text": "a"},
                                   {"type": "text", "text": "b"}]}],
     [("user", "a\nb")]),
    ([*ASKED, {"role": "assistant", "content": "Yo"}, 
      {"role": "user", "content": "So?", "name": "x"}],
     [("user", "Hi"), ("assistant", "Yo"), ("user", "So?")]),
    ([*ASKED, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}]},
      {"role": "tool", "tool_call_id": "1", "content": "4"}],
     [("user", "Hi"), ("assistant", '{"name": "f", "arguments": {"a": "ü"}}'), ("tool", "4")]),
])  # fmt: skip
def test_what_the_model_reads(server, engine, messages, expected):
    answered(server.post(CHAT, messages=messages, max_tokens=1))
    assert engine.prompts[-1] == conversation(*expected)


def test_control_tokens_that_users_write_are_text(server, engine):
    answered(server.post(CHAT, messages=[{"role": "user", "content": "a<|end|>b"}], max_tokens=1))
    assert engine.prompts[-1] == [START, *b"user\na<|end|>b", END, START, *b"assistant\n"]


def test_an_answer_may_fill_the_context(server, engine):
    answered(server.post(CHAT, messages=ASKED))
    assert engine.params[-1].max_new_tokens == MAX_CONTEXT - len(conversation(("user", "Hi")))
    for asked in ({"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}):
        assert (
            answered(server.post(CHAT, messages=ASKED, **asked))["usage"]["completion_tokens"] == 3
        )


def test_log_probabilities_in_the_other_shape(server):
    asked = {"messages": ASKED, "max_tokens": 3, "logprobs": True}
    (choice,) = answered(server.post(CHAT, **asked, top_logprobs=2))["choices"]
    first, _, third = choice["logprobs"]["content"]
    assert first == {
        "token": "G", "logprob": -0.25, "bytes": [71],
        "top_logprobs": [{"token": "G", "logprob": -0.25, "bytes": [71]},
                         {"token": "H", "logprob": -1.25, "bytes": [72]}],
    }  # fmt: skip
    assert third["bytes"] == [0xC3]  # half of a character
    (choice,) = answered(server.post(CHAT, **asked))["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], [], []]


@pytest.mark.parametrize("how", [
    {}, {"n": 3}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"return_token_ids": True},
    {"stop": "answer", "n": 2}, {"max_tokens": 1},
])  # fmt: skip
@pytest.mark.parametrize("has_usage", [False, True])
def test_a_stream_is_the_same_answer_in_pieces(server, how, has_usage):
    asked = {"messages": ASKED, "max_tokens": 60} | how
    whole = answered(server.post(CHAT, **asked))
    response = server.post(CHAT, **asked, stream=True, stream_options={"include_usage": has_usage})
    found = events.read(response.text)
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        first, *pieces = events.choices(found, choice["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in piece["delta"] for piece in pieces)
        text = "".join(piece["delta"].get("content", "") for piece in pieces)
        assert text == choice["message"]["content"]
        assert "\ufffd" not in str([piece["delta"] for piece in pieces[:-1]])  # but at the end
        assert [p["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            told = [token for p in pieces if p["logprobs"] for token in p["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
        if "return_token_ids" in how:
            assert [id for piece in pieces for id in piece["token_ids"]] == choice["token_ids"]
    if has_usage:
        *chunks, last = found
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in event for event in found)


def test_the_role_comes_with_the_first_token(engine, server):
    """Who measures the time to the first token takes the first chunk for it."""
    before = engine.num_steps
    with server.http.stream("POST", CHAT, json={"messages": ASKED, "stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: ")
        assert engine.num_steps > before


@pytest.mark.parametrize("path, asked", [
    (CHAT, {"messages": ASKED}), ("/v1/completions", {"prompt": "Hi"}),
])  # fmt: skip
def test_lengths_of_events_tell_nothing_where_that_is_asked_for(server, path, asked):
    how = {"stream": True, "max_tokens": 60} | asked
    sizes = {}
    for hides in (False, True):
        options = {"include_obfuscation": hides, "include_usage": True}
        text = server.post(path, **how, stream_options=options).text
        found = events.read(text)
        *chunks, last = found
        assert "obfuscation" not in last and last["usage"]["completion_tokens"] == 60
        told = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"] is None]
        assert all(("obfuscation" in chunk) == hides for chunk in chunks)
        lines = [line for line in text.split("\n\n") if '"finish_reason":null' in line]
        assert len(lines) == len(told) > 20
        sizes[hides] = {len(line.encode()) for line in lines}
    assert len(sizes[False]) > 2 and len(sizes[True]) == 1
    assert len({chunk["obfuscation"] for chunk in told}) > 20  # it is not the same each time
