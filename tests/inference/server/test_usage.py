"""What is counted, cut and told of tokens: usage, ids, limits, and when to come again."""

import dataclasses

import pytest

from inference.server.protocol.errors import unavailable
from tests.inference.server import events
from tests.inference.server.fake_engine import END, MAX_CONTEXT, START, FakeEngine, reply
from tests.inference.server.running import running

TEXT, CHAT, VECTORS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CONVERSATION = [START, *b"user\nHi", END, START, *b"assistant\n"]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path, asked", [
    (CHAT, ASKED | {"n": 2}), (TEXT, {"prompt": ["Hi", "you"], "echo": True}),
    (TEXT, {"prompt": "Hi", "n": 2}),
])  # fmt: skip
def test_no_event_counts_a_token_before_it_is_told(server, path, asked):
    """The role of a message and an echoed prompt come before the first token."""
    how = asked | {"max_tokens": 3, "stream": True, "return_token_ids": True}
    *chunks, last = events.read(server.post(path, **how, stream_options=USAGE).text)
    num_ids = 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        num_ids += len(choice.get("token_ids", ()))
        usage = chunk["usage"]
        assert usage["completion_tokens"] == num_ids
        assert usage["total_tokens"] == usage["prompt_tokens"] + num_ids
    assert chunks[0]["usage"]["completion_tokens"] == (path == TEXT and "echo" not in asked)
    assert num_ids == last["usage"]["completion_tokens"] == 6


def test_ids_of_a_conversation_come_with_the_answer(server):
    how = ASKED | {"max_tokens": 5, "n": 2, "return_token_ids": True}
    given = server.post(CHAT, **how).json()
    assert given["prompt_token_ids"] == CONVERSATION
    assert [choice["token_ids"] for choice in given["choices"]] == [reply(5), reply(5)]
    first, *chunks = events.read(server.post(CHAT, **how, stream=True).text)
    assert first["prompt_token_ids"] == CONVERSATION
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    assert server.post(CHAT, **ASKED, max_tokens=1).json()["prompt_token_ids"] is None


def test_ids_of_prompts_come_with_the_first_piece_of_each(server):
    how = {"prompt": ["ab", "c"], "max_tokens": 2, "return_token_ids": True}
    given = server.post(TEXT, **how).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in given] == [[97, 98], [99]]
    chunks = events.read(server.post(TEXT, **how, stream=True).text)
    for index, prompt in enumerate(([97, 98], [99])):
        first, *others = events.choices(chunks, index)
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in other for other in others)


@pytest.mark.parametrize("path, asked", [
    (CHAT, ASKED), (TEXT, {"prompt": "a" * 300}), (TEXT, {"prompt": ["a" * 300] * 2}),
])  # fmt: skip
def test_cached_tokens_count_once_for_a_prompt(path, asked):
    """However many answers it has: each of them was computed from the same pages."""

    class Cached(FakeEngine):
        def _advance(self, each):
            return dataclasses.replace(super()._advance(each), num_cached_tokens=16)

    with running(Cached()) as server:
        num_prompts = len(asked["prompt"]) if isinstance(asked.get("prompt"), list) else 1
        for n in (1, 2):
            how = asked | {"n": n, "max_tokens": 4}
            usage = server.post(path, **how).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 16 * num_prompts
            stream = server.post(path, **how, stream=True, stream_options={"include_usage": True})
            assert events.read(stream.text)[-1]["usage"] == usage


@pytest.mark.parametrize("path, asked, most", [
    (TEXT, {"prompt": "a" * 500, "max_tokens": 100}, 12),
    (TEXT, {"prompt": "a", "max_tokens": 2**31 - 1}, MAX_CONTEXT - 1),
    (TEXT, {"prompt": ["a", "a" * 510], "max_tokens": 3}, 2),
    (CHAT, ASKED | {"max_tokens": 10_000}, MAX_CONTEXT - len(CONVERSATION)),
    (CHAT, ASKED | {"max_completion_tokens": 10_000}, MAX_CONTEXT - len(CONVERSATION)),
])  # fmt: skip
def test_an_answer_ends_with_the_context(server, engine, path, asked, most):
    given = server.post(path, **asked).json()
    assert engine.params[-1].max_new_tokens == most
    assert {choice["finish_reason"] for choice in given["choices"]} == {"length"}


@pytest.mark.parametrize("asked, first, num", [
    ({"truncate_prompt_tokens": 5}, b"vwxyz", 5), ({"truncate_prompt_tokens": 99}, b"a", 26),
    ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, b"abcde", 5),
    ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, b"vwxyz", 5),
    ({"truncate_prompt_tokens": 0}, b"a", 26), ({"truncate_prompt_tokens": -1}, b"a", 26),
])  # fmt: skip
def test_prompts_are_cut(server, engine, asked, first, num):
    text = "abcdefghijklmnopqrstuvwxyz"
    for prompt in (text, list(text.encode())):
        given = server.post(TEXT, prompt=prompt, max_tokens=1, echo=True, **asked).json()
        cut = bytes(engine.prompts[-1])
        assert cut.startswith(first) and len(cut) == given["usage"]["prompt_tokens"] == num
        assert given["choices"][0]["text"] == cut.decode() + "G"


def test_what_is_too_long_is_cut_to_the_context(server, engine):
    for asked, num in (({}, 511), ({"max_tokens": 12}, 500), ({"max_tokens": 10**6}, 511)):
        how = {"prompt": "a" * 600, "truncate_prompt_tokens": -1} | asked
        assert server.post(TEXT, **how).status_code == 200
        assert len(engine.prompts[-1]) == num
    long = [{"role": "user", "content": "a" * 600}]
    assert server.post(CHAT, messages=long, truncate_prompt_tokens=30).status_code == 200
    assert bytes(engine.prompts[-1][-10:]) == b"assistant\n" and len(engine.prompts[-1]) == 30
    still = server.post(TEXT, prompt="a" * 600, truncate_prompt_tokens=600)
    assert still.status_code == 400 and still.json()["error"]["param"] == "prompt"
    for most, num in ((-1, 512), (9, 9)):
        given = server.post(VECTORS, input="b" + "a" * 599, truncate_prompt_tokens=most).json()
        assert given["usage"]["prompt_tokens"] == num and engine.prompts[-1][0] == ord("b")


@pytest.mark.parametrize("seconds, header", [
    (None, "1"), (0.0, "1"), (-3.0, "1"), (1.2, "2"), (599.5, "600"), (601.0, "600"), (1e9, "600"),
])  # fmt: skip
def test_a_client_is_asked_to_come_again_within_ten_minutes(seconds, header):
    assert unavailable("full", seconds).headers == {"retry-after": header}
