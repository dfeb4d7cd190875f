"""Chats by OpenAI's client, whole and streamed."""

import pytest
from openai.types.chat import ChatCompletion

from tests.inference.server.fake_engine import MAX_SEQS, reply

ASKED = [{"role": "user", "content": "Hi"}]
HOW = {"model": "fake", "messages": ASKED, "temperature": 0}
TEXT = bytes(reply(200)).decode(errors="ignore")


@pytest.fixture
def create(client):
    def ask(**asked):
        return client.chat.completions.create(**HOW | asked)

    return ask


def joined(stream):
    """Text and reason of each answer, by its index."""
    found = {}
    for chunk in stream:
        for choice in chunk.choices:
            text, _ = found.get(choice.index, ("", None))
            found[choice.index] = text + (choice.delta.content or ""), choice.finish_reason
    return found


def test_an_answer(create):
    found = create(max_tokens=20)
    assert isinstance(found, ChatCompletion) and found.object == "chat.completion"
    assert found.id.startswith("chatcmpl-") and found.model == "fake" and found.created > 10**9
    (choice,) = found.choices
    assert choice.index == 0 and choice.finish_reason == "length" and choice.logprobs is None
    assert choice.message.role == "assistant" and choice.message.content == bytes(reply(20)).decode(
        errors="replace"
    )
    assert choice.message.tool_calls is None and choice.message.refusal is None


def test_usage_adds_up(create):
    usage = create(max_tokens=20).usage
    assert usage.completion_tokens == 20 and usage.prompt_tokens > 10
    assert usage.total_tokens == usage.prompt_tokens + 20
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_an_answer_that_ends_by_itself(create, parrot):
    parrot.says = "Grüße 🙂"
    (choice,) = create().choices
    assert choice.message.content == "Grüße 🙂" and choice.finish_reason == "stop"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_both_limits(create, limit):
    found = create(**{limit: 3})
    assert found.usage.completion_tokens == 3 and found.choices[0].finish_reason == "length"


def test_a_stream_is_the_same_answer(create):
    whole = create(max_tokens=60).choices[0]
    assert joined(create(max_tokens=60, stream=True)) == {0: (whole.message.content, "length")}


def test_a_streams_chunks(create):
    chunks = list(create(max_tokens=10, stream=True))
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *rest = (chunk.choices[0] for chunk in chunks)
    assert first.delta.role == "assistant" and first.delta.content == ""
    assert all(choice.delta.role is None for choice in rest)
    assert [choice.finish_reason for choice in rest] == [None] * (len(rest) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_counts_tokens_where_that_is_asked_for(create):
    chunks = list(create(max_tokens=10, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_can_hide_lengths(create):
    chunks = list(create(max_tokens=10, stream=True, stream_options={"include_obfuscation": True}))
    assert all(isinstance(chunk.obfuscation, str) for chunk in chunks)


def test_a_stream_can_be_left(create):
    with create(stream=True) as stream:
        next(stream)
    assert create(max_tokens=1).choices  # the next is served


def test_several_answers(create):
    found = create(n=3, max_tokens=8, temperature=1, seed=5)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) == 3
    assert found.usage.completion_tokens == 24


def test_several_answers_as_a_stream(create):
    how = {"n": MAX_SEQS, "max_tokens": 8, "temperature": 1, "seed": 5}
    whole = {c.index: (c.message.content, "length") for c in create(**how).choices}
    assert joined(create(**how, stream=True)) == whole


def test_a_seed_gives_the_same_again(create):
    texts = [create(seed=seed, temperature=1, max_tokens=5).choices[0].message.content
             for seed in (7, 7, 8)]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
    prints = {create(seed=seed, max_tokens=1).system_fingerprint for seed in (7, 8)}
    assert len(prints) == 1 and None not in prints


@pytest.mark.parametrize("stop", ["answer", ["never", "answer"]])
@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings(create, stop, streams):
    found = create(stop=stop, stream=streams)
    text, reason = joined(found)[0] if streams else (
        found.choices[0].message.content, found.choices[0].finish_reason)  # fmt: skip
    assert text == TEXT[: TEXT.index("answer")] and reason == "stop"


def test_log_probabilities(create):
    found = create(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.token for token in found[:2]] == ["G", "r"]
    assert all(token.logprob == -0.25 and len(token.top_logprobs) == 2 for token in found)
    assert found[2].bytes == [0xC3]  # half of a character
    chunks = create(max_tokens=3, logprobs=True, top_logprobs=2, stream=True)
    told = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert sum(told, []) == found


def test_biases_and_penalties_are_taken(create, parrot):
    create(
        max_tokens=1, logit_bias={"65": -100}, presence_penalty=1, frequency_penalty=-1, top_p=0.5
    )
    params = parrot.params[-1]
    assert params.logit_bias == ((65, -100.0),) and params.top_p == 0.5
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)


def test_fields_of_others_go_as_extra_body(create, parrot):
    create(
        max_tokens=9,
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2},
    )
    params = parrot.params[-1]
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (
        3,
        0.1,
        1.1,
        2,
    )


def test_roles_and_parts_reach_the_model(create, parrot):
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    create(max_tokens=1, messages=[
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Three"}, {"role": "user", "content": "Four?"},
    ])  # fmt: skip
    assert parrot.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n<|im_start|>user\nFour?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_fields_without_an_effect_are_accepted(client):
    raw = client.chat.completions.with_raw_response.create(
        **HOW, max_tokens=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        safety_identifier="s", prompt_cache_key="k", reasoning_effort="medium", verbosity="low",
    )  # fmt: skip
    assert raw.headers["x-ignored-params"] == "verbosity"
    assert raw.parse().usage.completion_tokens == 1


def test_raw_responses(client):
    raw = client.chat.completions.with_raw_response.create(
        **HOW, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.http_response.status_code == 200
    assert raw.parse()._request_id == "mine-1"


def test_responses_that_are_read_as_they_come(client):
    how = client.chat.completions.with_streaming_response
    with how.create(**HOW, max_tokens=5) as response:
        assert response.headers["content-type"] == "application/json"
        assert response.parse().usage.completion_tokens == 5
    with how.create(**HOW, max_tokens=5, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_the_helper_for_streams(client, parrot):
    parrot.says = "Grüße, 世界!"
    with client.chat.completions.stream(**HOW) as stream:
        kinds, text = [], ""
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "content.delta" else ""
        final = stream.get_final_completion()
    assert text == parrot.says == final.choices[0].message.content
    assert "chunk" in kinds and kinds.count("content.done") == 1
    assert final.choices[0].finish_reason == "stop"


def test_a_prefix_of_the_answer(create, parrot):
    parrot.says = "42."
    messages = [*ASKED, {"role": "assistant", "content": "It is "}]
    found = create(messages=messages, extra_body={"continue_final_message": True})
    assert found.choices[0].message.content == "42." and parrot.prompt.endswith("It is ")


def test_variables_of_the_template(create, parrot):
    create(max_tokens=1, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert parrot.prompt.endswith("<think>\n\n</think>\n\n")
