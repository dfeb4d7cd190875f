"""POST /v1/completions: what is echoed, scored, counted and streamed."""

import itertools

import pytest

from inference.scheduling.sequence import derived_seed
from inference.server.protocol.logprobs import CompletionShape
from inference.server.text_processor import TextProcessor
from tests.inference.server import events
from tests.inference.server.fake_engine import (
    END,
    MAX_CONTEXT,
    MAX_SEQS,
    REPLY,
    reply,
    tokenizer,
)

TEXT = "/v1/completions"


def say(n, **how):
    return bytes(reply(n, **how)).decode(errors="replace")


def answered(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_what_clients_read(server):
    given = answered(server.post(TEXT, model="fake", prompt="Hi", max_tokens=8))
    (choice,) = given["choices"]
    assert given["id"].startswith("cmpl-") and given["object"] == "text_completion"
    assert given["model"] == "fake" and given["system_fingerprint"] == "fake-1"
    assert choice["text"] == say(8) == "Grüße," and choice["finish_reason"] == "length"
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    usage = {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert usage.items() <= given["usage"].items()
    assert given["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("prompt, num_choices, num_tokens", [
    ("Hi", 1, 2), (["Hi", "there"], 2, 7), ([72, 105], 1, 2), ([[72, 105], [1, 2, 3]], 2, 5),
])  # fmt: skip
def test_prompts_are_texts_or_ids_or_lists_of_these(
    server, engine, prompt, num_choices, num_tokens
):
    engine.prompts.clear()
    given = answered(server.post(TEXT, prompt=prompt, max_tokens=1))
    assert [choice["index"] for choice in given["choices"]] == list(range(num_choices))
    assert given["usage"]["prompt_tokens"] == num_tokens
    assert sum(map(len, engine.prompts)) == num_tokens


def test_sixteen_tokens_where_nothing_is_said(server):
    assert answered(server.post(TEXT, prompt="a"))["usage"]["completion_tokens"] == 16
    ids = [1] * (MAX_CONTEXT - 3)
    assert answered(server.post(TEXT, prompt=ids))["usage"]["completion_tokens"] == 3


def test_choices_are_in_the_order_of_prompts(server):
    asked = {"n": 2, "max_tokens": 4, "echo": True, "temperature": 1, "seed": 7}
    given = answered(server.post(TEXT, prompt=["a", "b"], **asked))
    texts = [choice["text"] for choice in given["choices"]]
    one, other = (say(4, seed=derived_seed(7, index)) for index in (0, 1))
    assert texts == [f"a{one}", f"a{other}", f"b{one}", f"b{other}"] and one != other
    assert given["usage"]["prompt_tokens"] == 2 and given["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stop, text, reason", [
    ("answer", "Grüße, 世界! 🙂 The ", "answer"), (["zzz", "世"], "Grüße, ", "世"),
    ("not there", REPLY[:30], None),
])  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings(server, stop, text, reason, streams):
    asked = {"prompt": "a", "stop": stop, "max_tokens": len(REPLY[:30].encode()), "stream": streams}
    for shown in (False, True):
        response = server.post(TEXT, **asked, include_stop_str_in_output=shown)
        found = (
            events.choices(events.read(response.text)) if streams else response.json()["choices"]
        )
        whole = "".join(choice["text"] for choice in found)
        assert whole == text + (reason or "") * shown
        assert found[-1]["stop_reason"] == reason
        assert found[-1]["finish_reason"] == ("stop" if reason else "length")


def test_stop_tokens_are_named(server):
    given = answered(server.post(TEXT, prompt="a", stop_token_ids=[ord("r")], max_tokens=9))
    assert given["choices"][0]["stop_reason"] == ord("r")


def test_log_probabilities_are_of_every_token(server):
    given = answered(server.post(TEXT, prompt="Hi", max_tokens=5, logprobs=2))
    found = given["choices"][0]["logprobs"]
    assert found["tokens"] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3"]
    assert found["text_offset"] == [0, 1, 2, 2, 3]  # whole characters before each
    assert found["token_logprobs"] == [-0.25] * 5
    assert found["top_logprobs"][0] == {"G": -0.25, "H": -1.25}
    alone = answered(server.post(TEXT, prompt="Hi", max_tokens=1, logprobs=0))
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == [{"G": -0.25}]


def test_a_token_comes_before_likelier_ones():
    """Clients of vLLM read the first name of `top_logprobs` as the token."""
    shape = CompletionShape(tokenizer(), skip_special=True, as_ids=False)
    found = shape.of([(ord("H"), -2.0, ((ord("G"), ord("H")), (-0.5, -2.0)))])
    assert list(found.top_logprobs[0].items()) == [("H", -2.0), ("G", -0.5)]


def test_what_was_not_requested_is_null_in_whole_answers(server):
    """Clients of vLLM read these fields without a look whether they are there."""
    (choice,) = answered(server.post(TEXT, prompt="Hi", max_tokens=1))["choices"]
    assert {choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")} == {None}
    messages = [{"role": "user", "content": "Hi"}]
    chat = answered(server.post("/v1/chat/completions", messages=messages, max_tokens=1))
    assert chat["choices"][0]["token_ids"] is None
    assert chat["prompt_token_ids"] is chat["prompt_logprobs"] is None


@pytest.mark.parametrize("num_new", [0, 1, 3])
def test_scores_as_evaluation_harnesses_ask_for_them(server, num_new):
    """With exact equality, they compare a token's log-probability and the best one's."""
    asked = {"echo": True, "logprobs": 1, "max_tokens": num_new, "temperature": 0, "seed": 1234}
    given = answered(server.post(TEXT, prompt=[list(b"Hello"), list(b"a")], **asked))
    for choice, prompt in zip(given["choices"], ("Hello", "a"), strict=True):
        found, length = choice["logprobs"], len(prompt) + num_new
        assert choice["text"] == prompt + say(num_new)
        assert {len(values) for values in found.values()} == {length}
        assert found["tokens"][: len(prompt)] == list(prompt)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for logprob, top in zip(
            found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
        ):
            assert logprob == max(top.values()) and top
        assert found["text_offset"] == list(range(length))
    assert given["usage"]["completion_tokens"] == 2 * num_new


def test_the_echo_of_token_ids_has_special_tokens(server):
    asked = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = answered(server.post(TEXT, prompt=[72, END, 73], **asked))["choices"]
    assert choice["text"] == "H<|end|>I" + say(1)
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]
    streamed = events.read(server.post(TEXT, prompt=[72, END, 73], stream=True, **asked).text)
    told = [chunk["choices"][0] for chunk in streamed]
    assert "".join(one["text"] for one in told) == choice["text"]
    assert sum((one["logprobs"]["text_offset"] for one in told), []) == [0, 1, 8, 9]


@pytest.mark.parametrize("most, echo, offsets", [
    (None, "a<|end|>bc", [0, 1, 8, 9, 10]), (4, "a<|end|>bc", [0, 1, 8, 9, 10]),
    (3, "<|end|>bc", [0, 7, 8, 9]), (1, "c", [0, 1]),
])  # fmt: skip
def test_the_echo_of_a_text_has_its_special_tokens(server, most, echo, offsets):
    body = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    body["truncate_prompt_tokens"] = most
    (choice,) = answered(server.post(TEXT, prompt="a<|end|>bc", **body))["choices"]
    assert choice["text"] == echo + say(1) and choice["logprobs"]["text_offset"] == offsets


def test_a_text_is_echoed_as_it_was_sent_unless_it_is_cut(server, monkeypatch):
    """Whatever its tokens spell: a tokenizer may put some around it."""

    async def decode(texts, ids):
        return "?" * len(ids)

    monkeypatch.setattr(TextProcessor, "decode", decode)
    body = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    for most, echo in ((None, "<|end|>ab"), (3, "<|end|>ab"), (2, "??")):
        (choice,) = answered(
            server.post(TEXT, prompt="<|end|>ab", truncate_prompt_tokens=most, **body)
        )["choices"]
        assert choice["text"] == echo + say(1)
        if most != 2:
            assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_nothing_is_generated_where_nothing_is_asked_for(server, engine):
    engine.prompts.clear()
    given = answered(server.post(TEXT, prompt=["Hi", "you"], max_tokens=0, echo=True, n=2))
    assert [c["text"] for c in given["choices"]] == ["Hi", "Hi", "you", "you"]
    assert {c["finish_reason"] for c in given["choices"]} == {"length"} and not engine.prompts


@pytest.mark.parametrize("how", [
    {}, {"n": 3, "temperature": 1, "seed": 5}, {"logprobs": 3},
    {"echo": True, "logprobs": 0, "n": 2}, {"echo": True, "max_tokens": 0},
    {"return_token_ids": True}, {"stop": ["42"]},
])  # fmt: skip
@pytest.mark.parametrize("options", [None, {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True}])  # fmt: skip
def test_a_stream_is_the_same_answer_in_pieces(server, how, options):
    asked = {"prompt": ["Hi", "you"], "max_tokens": 60} | how
    whole = answered(server.post(TEXT, **asked))
    response = server.post(TEXT, **asked, stream=True, stream_options=options)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    found = events.read(response.text)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in found}) == 1
    for choice in whole["choices"]:
        pieces = events.choices(found, choice["index"])
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert "\ufffd" not in "".join(p["text"] for p in pieces[:-1])  # but at the end
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == [
            choice["finish_reason"]
        ]
        assert pieces[-1]["finish_reason"] and pieces[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
                assert list(itertools.chain.from_iterable(parts)) == values
        if "return_token_ids" in how:
            ids = [id for piece in pieces for id in piece["token_ids"]]
            assert ids == choice["token_ids"] == reply(60)
            assert choice["prompt_token_ids"] == list(asked["prompt"][choice["index"]].encode())
    if options is None:
        assert all("usage" not in event for event in found)
        return
    *chunks, last = found
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    if "continuous_usage_stats" in options:
        counted = [chunk["usage"]["total_tokens"] for chunk in chunks]
        assert counted == sorted(counted) and counted[-1] == last["usage"]["total_tokens"]
    else:
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)


def test_every_field_reaches_the_engine(server, engine):
    asked = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": -100, "7": 2.5},
        "allowed_token_ids": [1, 2], "min_tokens": 2, "stop": ["x", "y"], "stop_token_ids": [END],
        "ignore_eos": True, "seed": -3, "priority": 5, "n": 2, "max_tokens": 9, "speculate": False,
    }  # fmt: skip
    answered(server.post(TEXT, prompt="a", **asked))
    params = engine.params[-1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert params.logit_bias == ((5, -100), (7, 2.5)) and params.allowed_token_ids == (1, 2)
    assert (params.min_tokens, params.stop, params.stop_token_ids) == (2, ("x", "y"), (END,))
    assert params.ignore_eos and params.seed == -3 and not params.speculate
    assert params.priority == 5
    assert (params.n, params.max_new_tokens) == (2, 9)
    answered(server.post(TEXT, prompt="a", best_of=3))
    assert engine.params[-1].best_of == 3 and not engine.params[-1].vote
    answered(server.post(TEXT, prompt="a", best_of=3, vote=True))
    assert engine.params[-1].vote


def test_defaults_are_those_of_clients(server, engine):
    seeds = set()
    nothing = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream"])
    for asked in ({}, nothing, {"top_k": -1}):
        body = {"prompt": "a", "max_tokens": 1} | asked
        assert server.http.post(TEXT, json=body).status_code == 200
        params = engine.params[-1]
        assert (params.temperature, params.top_p, params.top_k, params.n) == (1, 1, 0, 1)
        assert params.stop == ()
        seeds.add(params.seed)
    assert None not in seeds and len(seeds) == 3  # drawn, so that another engine could go on


def test_a_seed_gives_the_same_answers(server):
    asked = {"prompt": "a", "temperature": 1, "seed": 4, "n": MAX_SEQS, "max_tokens": 20}
    first, second = (answered(server.post(TEXT, **asked))["choices"] for _ in range(2))
    assert first == second and len({choice["text"] for choice in first}) == MAX_SEQS


def test_log_probabilities_of_prompts(server, engine):
    asked = {"max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    given = answered(server.post(TEXT, prompt=["Hi", "a"], **asked))
    first, second, third, _ = (choice["prompt_logprobs"] for choice in given["choices"])
    assert first == second == [
        None,
        {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"},
         "106": {"logprob": -1.5, "rank": 2, "decoded_token": "j"}},
    ]  # fmt: skip
    assert third == [None]
    alone = answered(server.post(TEXT, prompt="Hi", max_tokens=0, prompt_logprobs=0))
    assert alone["choices"][0]["prompt_logprobs"][1] == {
        "105": {"logprob": -0.5, "rank": None, "decoded_token": "i"}
    }
    messages = [{"role": "user", "content": "Hi"}]
    chat = answered(server.post("/v1/chat/completions", messages=messages, prompt_logprobs=1))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [params.max_new_tokens > 0 for params in engine.params[-2:]] == [False, True]
