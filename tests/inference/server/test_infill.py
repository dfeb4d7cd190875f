"""Texts around a gap: `suffix` of completions, and POST /infill with llama.cpp's fields."""

import json

import msgspec
import pytest

from tests.inference.server import events
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import GAP_MARKS, MAX_CONTEXT, FakeEngine, reply
from tests.inference.server.running import running
from tests.inference.server.test_bad_input import error_of

TEXT, INFILL = "/v1/completions", "/infill"
PREFIX, SUFFIX, MIDDLE, PAD = range(261, 265)
AROUND = {"input_prefix": "ab", "input_suffix": "cd", "temperature": 0}
GAP = [PREFIX, *b"ab", SUFFIX, *b"cd", MIDDLE]
GAP_FIRST = [PREFIX, SUFFIX, *b"cd", MIDDLE, *b"ab"]


def say(n):
    return bytes(reply(n)).decode(errors="replace")


def answered(response):
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    return response.json()


def parts(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class Padded(FakeEngine):
    """It ends what fills a gap as models do."""

    def plan(self, params, seed):
        return [*b"mid", PAD, *b"x" * params.max_new_tokens]


class Marked(FakeEngine):
    """Its model's marks have other names."""

    def __init__(self, *marks: str):
        super().__init__()
        self._marks = marks

    def facts(self):
        facts = super().facts()
        backend = facts.text.backend
        for old, new in zip(GAP_MARKS, self._marks, strict=True):
            backend = backend.replace(old, new)
        text = msgspec.structs.replace(facts.text, backend=backend)
        return msgspec.structs.replace(facts, text=text)


@pytest.mark.parametrize("streams", [False, True])
def test_a_suffix_is_what_follows_the_answer(server, engine, streams):
    response = server.post(TEXT, prompt="ab", suffix="cd", max_tokens=9, stream=streams)
    found = events.choices(events.read(response.text)) if streams else response.json()["choices"]
    assert "".join(choice["text"] for choice in found) == say(9)
    assert found[-1]["finish_reason"] == "length"
    assert engine.prompts[-1] == GAP
    if not streams:
        assert response.json()["usage"]["prompt_tokens"] == len(GAP)


@pytest.mark.parametrize("body, prompt", [
    ({"suffix_first": True}, GAP_FIRST), ({"suffix_first": False}, GAP),
    ({"prompt": ""}, [PREFIX, SUFFIX, *b"cd", MIDDLE]), ({"suffix": ""}, [*b"ab"]),
    ({"add_special_tokens": False}, GAP),
    ({"prompt": "<fim_middle>"}, [PREFIX, *b"<fim_middle>", SUFFIX, *b"cd", MIDDLE]),
    ({"suffix": "x" * 300}, [PREFIX, *b"ab", SUFFIX, *b"x" * 300, MIDDLE]),
])  # fmt: skip
def test_the_model_reads_marks_around_both_texts(server, engine, body, prompt):
    answered(server.post(TEXT, **{"prompt": "ab", "suffix": "cd", "max_tokens": 1} | body))
    assert engine.prompts[-1] == prompt


def test_other_fields_mean_what_they_mean_without_a_suffix(server, engine):
    how = {"n": 2, "logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0, "stop": "ß"}
    choices = answered(server.post(TEXT, prompt="ab", suffix="cd", max_tokens=9, **how))["choices"]
    for choice in choices:
        assert choice["text"] == "Grü" and choice["stop_reason"] == "ß"
        assert choice["prompt_token_ids"] == GAP and len(choice["prompt_logprobs"]) == len(GAP)
        assert choice["logprobs"]["text_offset"][0] == 0
    assert engine.params[-1].stop == ("ß",)


def test_the_end_of_a_middle_is_an_end():
    with running(Padded()) as server:
        (choice,) = answered(server.post(TEXT, prompt="a", suffix="b", max_tokens=20))["choices"]
        assert choice["text"] == "mid"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        body = {"prompt": "a", "suffix": "b", "max_tokens": 20}
        (choice,) = answered(server.post(TEXT, **body, stop_token_ids=[PAD]))["choices"]
        assert choice["stop_reason"] == PAD  # of the request
        (choice,) = answered(server.post(TEXT, **body, ignore_eos=True))["choices"]
        assert choice["finish_reason"] == "length"
        answer = answered(server.post(INFILL, **AROUND))
        assert (answer["content"], answer["stop"], answer["stop_type"]) == ("mid", True, "eos")
        error = error_of(server.post(TEXT, **body, min_tokens=1, stop_token_ids=[*range(8)]))
        assert error["param"] == "stop_token_ids" and "with 1 of this model's" in error["message"]


def test_infill_answers_as_llama_cpp_does(server, engine):
    answer = answered(server.post(INFILL, **AROUND, n_predict=8, return_token_ids=True))
    assert engine.prompts[-1] == GAP
    assert answer == {
        "content": say(8), "tokens": reply(8), "stop": True, "model": "fake", "index": 0,
        "tokens_evaluated": len(GAP), "tokens_cached": 0, "tokens_predicted": 8,
        "stop_type": "limit", "stopping_word": "", "weight_versions": [[0, 8, 0]],
    }  # fmt: skip
    validator(server, INFILL).validate(answer)
    answer = answered(server.post(INFILL, **AROUND, stop=["ß"]))
    assert (answer["content"], answer["tokens"]) == ("Grü", [])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "ß")
    assert engine.params[-1].max_new_tokens == MAX_CONTEXT - len(GAP)  # without n_predict
    answer = answered(server.post(INFILL, **AROUND, n_predict=0))
    assert (answer["content"], answer["tokens_predicted"], answer["stop"]) == ("", 0, True)


def test_a_streamed_infill_is_the_same_answer_in_parts(server):
    body = AROUND | {"n_predict": 40, "return_token_ids": True}
    whole = answered(server.post(INFILL, **body))
    streamed = parts(server.post(INFILL, **body, stream=True))
    checked = validator(server, INFILL, "text/event-stream")
    assert len(streamed) > 20 and all(checked.is_valid(part) for part in streamed)
    assert [part["stop"] for part in streamed] == [False] * (len(streamed) - 1) + [True]
    assert {part["stop_type"] for part in streamed[:-1]} == {"none"}
    assert "".join(part["content"] for part in streamed) == whole["content"]
    assert sum((part["tokens"] for part in streamed), []) == whole["tokens"]
    summed = ("content", "tokens", "weight_versions")
    last = streamed[-1] | {name: whole[name] for name in summed}
    assert last == whole


def test_other_files_and_the_current_line_are_read(server, engine):
    files = [{"filename": "a.py", "text": "x"}, {"text": "y"}]
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "cd", "n_predict": 1}
    # What llama.vim sends besides.
    body |= {"samplers": ["top_k", "infill"], "n_indent": 4, "t_max_prompt_ms": 500,
             "t_max_predict_ms": 1000, "response_fields": ["content"], "top_k": 40,
             "cache_prompt": False}  # fmt: skip
    answered(server.post(INFILL, **body, input_extra=files))
    before = b"\n\n--- a.py ---\n\nx\n\n--- snippet ---\n\ny"
    assert engine.prompts[-1] == [*before, *GAP] and engine.params[-1].top_k == 40
    answered(server.post(INFILL, **body, suffix_first=True))
    assert engine.prompts[-1] == GAP_FIRST


@pytest.mark.parametrize("body, param, why", [
    ({"prompt": ["a", "b"]}, "suffix", "goes with one text"),
    ({"prompt": [1, 2]}, "suffix", "goes with one text"),
    ({"prompt": None}, "suffix", "goes with one text"),
    ({"echo": True}, "suffix", "echo exclude each other"),
    ({"suffix": None, "suffix_first": True}, "suffix_first", "goes with a suffix"),
    ({"truncate_prompt_tokens": 9, "truncation_side": "left"}, "truncation_side", "suffix"),
    ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "marks around the gap take 3"),
    ({"suffix": "x" * MAX_CONTEXT}, "prompt", f"{MAX_CONTEXT + 5} are given"),
    ({"suffix": "x" * 16 * MAX_CONTEXT}, "prompt", "characters are more than 16"),
    ({"suffix": "\ud800"}, None, "not valid JSON"),
])  # fmt: skip
def test_what_a_suffix_does_not_go_with(server, body, param, why):
    body = {"prompt": "ab", "suffix": "cd", "temperature": 0} | body
    data, how = json.dumps(body).encode(), {"content-type": "application/json"}
    error = error_of(server.http.post(TEXT, content=data, headers=how))
    assert error["param"] == param and why in error["message"]


@pytest.mark.parametrize("body, param, why", [
    ({"input_suffix": None}, "input_suffix", "expected a text"),
    ({"input_prefix": "x" * MAX_CONTEXT}, "input_prefix", "are given"),
    ({"input_extra": [{"text": "x" * MAX_CONTEXT}]}, "input_extra", "are given"),
    ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text", "is required"),
    ({"n": 2}, "n", "send POST /v1/completions"), ({"n_cmpl": 2}, "n_cmpl", "is 1 here"),
    ({"logprobs": 1}, "logprobs", "send a completion"), ({"suffix": "x"}, "suffix", "completion"),
    ({"n_probs": 2}, "n_probs", "send logprobs"),
])  # fmt: skip
def test_wrong_fields_of_infill_are_named(server, body, param, why):
    error = error_of(server.post(INFILL, **AROUND | body))
    assert error["param"] == param and why in error["message"]


def test_a_part_of_infill_elsewhere_is_rejected(server):
    error = error_of(server.post(TEXT, prompt="a", input_suffix="b"))
    assert error["param"] == "input_suffix" and "POST /infill" in error["message"]


@pytest.mark.parametrize("limit, num", [(-1, MAX_CONTEXT - 4), (40, 40)])
def test_a_long_text_is_cut_away_from_the_gap_where_that_is_requested(server, engine, limit, num):
    body = {"prompt": "p" * MAX_CONTEXT, "suffix": "s" * MAX_CONTEXT, "max_tokens": 4}
    answered(server.post(TEXT, **body, truncate_prompt_tokens=limit))
    prompt = engine.prompts[-1]
    assert len(prompt) == num and (prompt[0], prompt[-1]) == (PREFIX, MIDDLE)
    num_suffix = (num - 3) // 4
    assert prompt[1 : num - num_suffix - 2] == [*b"p" * (num - 3 - num_suffix)]
    assert prompt[-num_suffix - 2 :] == [SUFFIX, *b"s" * num_suffix, MIDDLE]
    answered(server.post(INFILL, **AROUND, input_extra=[{"text": "x" * MAX_CONTEXT}],
                         truncate_prompt_tokens=40, n_predict=1))  # fmt: skip
    assert engine.prompts[-1] == GAP


def test_a_model_without_marks_fills_no_gaps():
    with running(Marked("<a>", "<b>", "<c>", "<d>")) as server:
        for path, body, param in (
            (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"), (INFILL, AROUND, "input_suffix"),
        ):  # fmt: skip
            error = error_of(server.post(path, **body))
            assert (error["param"], error["code"]) == (param, "unsupported")
            assert "no fill-in-the-middle tokens (<|fim_prefix|>" in error["message"]
            assert "send the prompt alone" in error["message"]
        answered(server.post(TEXT, prompt="<fim_prefix>", suffix="", max_tokens=1))


def test_a_model_of_one_order_rejects_the_other():
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    with running(Marked(*qwen)) as server:
        body = AROUND | {"max_tokens": 1}
        answered(server.post(INFILL, **body, suffix_first=False))
        error = error_of(server.post(INFILL, **body, suffix_first=True))
        assert error["param"] == "suffix_first" and "or send false" in error["message"]
