"""A fault inside one request ends that request; the others miss nothing."""

import contextlib
from collections import deque

import jax
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from inference.request import SamplingParams
from inference.request_state import RequestState
from inference.runtime.batch import parameters
from inference.scheduling.data_shard import DataShard
from inference.scheduling.page_manager import PageManager
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Sequence
from inference.scheduling.step_output import Commit, StepResults
from inference.scheduling.step_schedule import ShardBuilder
from inference.text.detokenizer import Detokenizer
from tests import fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama(max_context=128)
SETTINGS = {"max_seqs": 8, "decode_rows": (8,), "page_tokens": 8, "chunk_tokens": 16}
PROMPTS = fakes.prompts((20, 3, 9), MODEL.vocab_size)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space = False
    byte_ids = frozenset()

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def make(**settings):
    settings = SETTINGS | {"prefill_chunks": (3,), "top_logprobs": 6} | settings
    return fakes.engine(MODEL, shapes="one", tokenizer=Bytes(), **settings)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_detokenizer_that_raises_ends_its_request_alone(overlap, monkeypatch, caplog):
    expected = make().generate(PROMPTS, fakes.greedy(8))
    engine, outputs = make(overlap=overlap), []
    ids = [engine.add_request(prompt, fakes.greedy(8)) for prompt in PROMPTS]
    (faulty,) = engine._requests[ids[1]]._detokenizers.values()
    push = faulty.push
    monkeypatch.setattr(faulty, "push", lambda ids: push(ids) if faulty.num_tokens < 2 else 1 // 0)
    while engine.scheduler.has_work:
        outputs += engine.step()
        engine.scheduler.check_integrity()
    for id, completion in zip(ids, expected, strict=True):
        own = [output for output in outputs if output.id == id]
        tokens = [token for output in own for token in output.token_ids]
        text = "".join(output.text for output in own)
        reasons = [output.finish_reason for output in own if output.finish_reason]
        if id == ids[1]:
            assert (tokens, reasons) == (completion.token_ids[:3], ["error"])
            assert text == bytes(tokens[:2]).decode(errors="replace")
        else:
            assert (tokens, text) == (completion.token_ids, completion.text)
            assert reasons == ["length"]
    assert not engine._requests and f"request {ids[1]} ends with an error" in caplog.text
    assert "ZeroDivisionError" in caplog.text


class PanicException(BaseException):
    """As pyo3 raises it where Rust panics."""


# What works on one sequence, and which of its arguments says on which.
STAGES = {
    "start": (DataShard, "start", lambda self, sequence, match: sequence),
    "allocate": (PageManager, "allocate", lambda self, sequence, num_tokens: sequence),
    "schedule": (ShardBuilder, "add", lambda self, sequence, num_tokens: sequence),
    "build": (parameters, "request_row", lambda sequence, vocab_size: sequence),
    "commit": (StepResults, "commit", lambda self, row, chunk: chunk.sequence),
    "cache": (PageManager, "cache", lambda self, sequence: sequence),
    "free": (PageManager, "free", lambda self, sequence: sequence),
    "text": (RequestState, "_new_text", lambda self, commit: commit.sequence),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_one_sequence_ends_that_one_alone(stage, monkeypatch, caplog):
    """Before or after what the stage does, in the answer that computes the prompt for two, or in
    the other one.
    """
    where, name, sequence_of = STAGES[stage]
    asked = SamplingParams(max_new_tokens=8, n=2)
    expected = make().generate(PROMPTS, asked)
    for nth, error in enumerate((PanicException("poison"), ValueError("poison"))):
        engine, outputs = make(), []
        ids = [engine.add_request(prompt, asked) for prompt in PROMPTS]
        faulty = _faulty(getattr(where, name), sequence_of, ids[1] + nth, error)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, faulty)
            for _ in range(100):
                outputs += engine.step()
                engine.scheduler.check_integrity()
        for id, completion in zip(ids, expected, strict=True):
            for index, answer in enumerate([completion, *completion.others]):
                own = [output for output in outputs if (output.id, output.index) == (id, index)]
                tokens = [token for output in own for token in output.token_ids]
                reasons = [output.finish_reason for output in own if output.finish_reason]
                is_victim = id + index == ids[1] + nth
                is_victim &= (stage, nth) != ("start", 1) and stage != "free"  # forked; whole
                assert reasons == ["error" if is_victim else "length"]
                assert tokens == answer.token_ids[: len(tokens) if is_victim else 8]
        pages = engine.scheduler.shards[0].pages
        assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
        assert not engine._requests and not engine.has_work and "poison" in caplog.text


def _faulty(works, sequence_of, id, error):
    """A panic comes before what a function does to a sequence of this id, an error after it."""

    def function(*args):
        is_its = sequence_of(*args).id == id
        if is_its and isinstance(error, PanicException):
            raise error
        found = works(*args)
        if is_its:
            raise error
        return found

    return function


@pytest.mark.parametrize("params", [fakes.greedy(8), SamplingParams(max_new_tokens=8, n=2)])
def test_a_text_that_cannot_be_made_again_ends_its_sequence_alone(params, monkeypatch, caplog):
    """After an interrupt, behind some of its tokens."""
    expected = make().generate(PROMPTS, params)
    engine, outputs = make(), []
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    follow, output = RequestState._follow, RequestState._output

    def interrupt(self, commit, text):
        if commit.sequence.id == ids[1] and commit.sequence.num_output_tokens == 4:
            monkeypatch.setattr(RequestState, "_output", output)
            monkeypatch.setattr(RequestState, "_follow", fail)
            raise KeyboardInterrupt
        return output(self, commit, text)

    def fail(self, sequence, num_tokens):
        follow(self, sequence, num_tokens)
        raise PanicException("poison")

    monkeypatch.setattr(RequestState, "_output", interrupt)
    num_interrupts = 0
    while engine.has_work:
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        engine.scheduler.check_integrity()
    assert num_interrupts == 1 and not engine._requests and "poison" in caplog.text
    for id, completion in zip(ids, expected, strict=True):
        for index, answer in enumerate([completion, *completion.others]):
            pieces = [output for output in outputs if (output.id, output.index) == (id, index)]
            is_victim = (id, index) == (ids[1], 0)
            tokens = [token for output in pieces for token in output.token_ids]
            assert tokens == answer.token_ids[: 4 if is_victim else 8]
            reasons = [output.finish_reason for output in pieces if output.finish_reason]
            assert reasons == ["error" if is_victim else "length"]


def test_what_is_known_of_an_answer_and_has_no_text_leaves_nothing_queued(monkeypatch):
    engine = make()
    parent = engine.add_request(PROMPTS[0], fakes.greedy(8))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push", lambda self, ids: 1 // (not [*ids]))
        with pytest.raises(ZeroDivisionError):
            engine.add_request(PROMPTS[1], fakes.greedy(8), [1, 2])
        with pytest.raises(ZeroDivisionError):
            engine.fork(parent, fakes.greedy(8))
    assert len(engine.scheduler.running) == 1 and not engine.scheduler.waiting
    fakes.drain(engine)
    assert not engine._requests


@pytest.mark.parametrize("between, is_passing", [
    ("nothing", False), ("an interrupt", False), ("a fault before a step", False),
    ("a fault behind a step", True), ("a step", True),
])  # fmt: skip
def test_failures_of_the_device_are_in_a_row_until_a_step_succeeds(
    between, is_passing, monkeypatch
):
    engine = make(overlap=False)
    ids = [engine.add_request(prompt, fakes.greedy(8)) for prompt in PROMPTS]

    def step(where=engine, name="config", value=engine.config):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            engine.step()

    def ending(error):
        def wait(output):
            raise error

        return engine.model_runner, "wait", wait

    def faulty(stage):
        where, name, sequence_of = STAGES[stage]
        error = ValueError("poison")
        return where, name, _faulty(getattr(where, name), sequence_of, ids[1], error)

    lost = ending(jax.errors.JaxRuntimeError("lost"))
    step(*lost)
    if between == "a step":
        step()
    elif between == "an interrupt":
        with pytest.raises(KeyboardInterrupt):
            step(*ending(KeyboardInterrupt()))
    elif between != "nothing":
        step(*faulty("cache" if "behind" in between else "start"))
    passes = contextlib.nullcontext()
    with passes if is_passing else pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
        step(*lost)
    fakes.drain(engine)
    assert not engine._requests


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=8, n=3),
        SamplingParams(max_new_tokens=8, n=2, best_of=3, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=8, n=2, beam_width=3),
    ],
)
def test_all_of_a_request_ends(params, monkeypatch):
    engine = make()
    expected = engine.generate([PROMPTS[0]], fakes.greedy(12))
    outputs, beside = [], fakes.greedy(12, stop=("never there",))
    monkeypatch.setattr(Detokenizer, "flush", lambda self: "" if self._stop else 1 // 0)
    found = engine.generate([PROMPTS[0], PROMPTS[1]], [beside, params], outputs.append)
    assert found[0].token_ids == expected[0].token_ids and found[0].finish_reason == "length"
    results = [found[1], *found[1].others]
    assert [result.finish_reason for result in results] == ["error"] * params.n
    last = [o for o in outputs if o.id == found[1].id and o.finish_reason]
    assert sorted((o.index, o.finish_reason) for o in last) == [
        (index, "error") for index in range(params.n)
    ]
    assert not engine._requests and not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def test_calls_keep_the_outputs_of_other_requests():
    (expected,) = make().generate(PROMPTS[:1], fakes.greedy(20))
    engine, tokens = make(), []
    id = engine.add_request(PROMPTS[0], fakes.greedy(20))
    engine.score(PROMPTS[:1])
    engine.generate(PROMPTS[1:2], fakes.greedy(5))
    list(engine.stream(PROMPTS[2], fakes.greedy(5)))
    for _ in range(20):
        for output in engine.step():
            assert output.id == id
            tokens += output.token_ids
    assert tokens == expected.token_ids and not engine._requests


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_have_the_log_probabilities_of_their_tokens(overlap):
    params = [
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=2, n=3),
        SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, n=2, best_of=3),
        SamplingParams(max_new_tokens=8, n=2, beam_width=3),
    ]
    engine, outputs = make(overlap=overlap), []
    found = engine.generate([PROMPTS[0]] * len(params), params, outputs.append)
    for completion in found:
        for index, answer in enumerate([completion, *completion.others]):
            own = [o for o in outputs if (o.id, o.index) == (completion.id, index)]
            for output in own:
                assert len(output.logprobs) == len(output.top_logprobs) == len(output.token_ids)
                assert output.num_cached_tokens <= len(PROMPTS[0])
            logprobs = [value for output in own for value in output.logprobs]
            tops = [dict(zip(*top, strict=True)) for o in own for top in o.top_logprobs]
            assert (logprobs, tops) == (answer.logprobs, answer.top_logprobs)
    assert any(output.num_cached_tokens for output in outputs)  # of siblings


def test_outputs_of_scores_have_those_of_the_prompt():
    (expected,) = make().score(PROMPTS[:1])
    engine, outputs = make(), []
    engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=0))
    while engine.scheduler.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert output.token_ids == [] and output.logprobs == expected.logprobs
    tops = [dict(zip(*top, strict=True)) for top in output.top_logprobs]
    assert tops == expected.top_logprobs


def test_outputs_say_what_stopped_them():
    (answer,) = make().generate(PROMPTS[:1], fakes.greedy(8))
    text, token = answer.text[2:4], answer.token_ids[4]
    for params, stopped in [
        (fakes.greedy(8), None),
        (fakes.greedy(8, stop=("never there", text)), text),
        (fakes.greedy(8, stop_token_ids=(token,)), token),
    ]:
        outputs: list = []
        make().generate(PROMPTS[:1], params, outputs.append)
        assert [output.stopped_by for output in outputs if output.finish_reason] == [stopped]
        assert not any(output.stopped_by for output in outputs if not output.finish_reason)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "stop, min_tokens, num_tokens, stopped",
    [
        (("the mat",), 0, 11, "the mat"), (("the m", "the mat", "t"), 0, 1, "t"),
        (("mat", "e m"), 0, 9, "e m"), (("the",), 3, 7, "the"), (("never",), 0, 16, None),
        (("t",), 16, 16, None),
    ],
)  # fmt: skip
def test_nothing_is_told_behind_a_stop_string(size, stop, min_tokens, num_tokens, stopped):
    """However many tokens a step commits, drafts or others."""
    text = b"the the mat sat."  # a token a byte
    scheduler = Scheduler(Config(MODEL, EngineConfig.of(**SETTINGS, cache_bytes=1 << 20)))
    params = fakes.greedy(16, stop=stop, min_tokens=min_tokens)
    sequence = Sequence(1, params, [5], 1)
    scheduler.add(sequence)
    outputs: deque = deque()
    state = RequestState([sequence], scheduler, Bytes(), outputs)
    for start in range(0, 16, size):
        tokens = list(text[start : start + size])
        values = [-float(start + n) for n in range(len(tokens))]
        commit = Commit(sequence, 1 + start, tokens, values, [([0], [v]) for v in values])
        commit.write()
        if start + size >= 16:
            scheduler.finish(sequence, FinishReason.LENGTH)
        state.process(commit)
        if state.group.is_finished:
            break
    told = [token for output in outputs for token in output.token_ids]
    assert bytes(told) == text[:num_tokens] and sequence.output_tokens == told
    logprobs = [-float(n) for n in range(num_tokens)]
    for values, tops in (
        (sequence.results.logprobs, sequence.results.top_logprobs),
        ([v for o in outputs for v in o.logprobs], [t for o in outputs for t in o.top_logprobs]),
    ):
        assert values == logprobs and tops == [([0], [value]) for value in logprobs]
    shown = "".join(output.text for output in outputs)
    assert shown.encode() == text[:num_tokens].removesuffix((stopped or "").encode())
    assert (outputs[-1].finish_reason, outputs[-1].stopped_by) == (
        "stop" if stopped else "length", stopped,
    )  # fmt: skip
    completion = state.group.completion()
    assert (completion.token_ids, completion.text) == (told, shown)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {
            "temperature": 1.0,
            "seed": 5,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
        },
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, MODEL.vocab_size, 97))},
    ],
)
def test_an_answer_goes_on_from_its_tokens(more):
    """In another engine, with the text, the penalties and the limits of the whole."""
    params = fakes.greedy(14, **more)
    (whole,) = make(penalties=True).generate(PROMPTS[:1], params)
    for known in (1, 6, len(whole.token_ids) - 1):
        engine, outputs = make(penalties=True), []
        engine.add_request(PROMPTS[0], params, whole.token_ids[:known])
        while engine.scheduler.has_work:
            outputs += engine.step()
            engine.scheduler.check_integrity()
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == whole.token_ids[known:]
        assert outputs[-1].finish_reason == whole.finish_reason
        logprobs = [value for output in outputs for value in output.logprobs]
        assert logprobs == pytest.approx(whole.logprobs[known:], abs=1e-5)


def test_text_goes_on_within_a_character_and_within_a_stop_string():
    (whole,) = make().generate(PROMPTS[:1], fakes.greedy(12))
    for known in range(1, 12):
        for stop in ((), (whole.text[4:8],)):
            params, texts = fakes.greedy(12, stop=stop), []
            outputs: list = []
            make().generate(PROMPTS[:1], params, outputs.append)
            told = "".join(output.text for output in outputs[:known])
            if len(outputs) <= known:
                continue
            engine = make()
            engine.add_request(PROMPTS[0], params, whole.token_ids[:known])
            while engine.scheduler.has_work:
                texts += [output.text for output in engine.step()]
            assert told + "".join(texts) == "".join(output.text for output in outputs)


@pytest.mark.parametrize("params, known", [({"n": 2}, 1), ({}, 8), ({"beam_width": 3}, 1)])
def test_what_cannot_go_on_is_refused(params, known):
    engine = make()
    with pytest.raises(InputError, match=f"^{known} tokens of an output go with n=1"):
        engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=8, **params), [1] * known)
    assert not engine.scheduler.has_work


def test_a_salt_keeps_prefixes_apart():
    """And what a request of another salt has cached does not even shorten its prompt."""
    engine = make()

    def num_cached(**how) -> int:
        outputs: list = []
        engine.generate(PROMPTS[:1], fakes.greedy(2, **how), outputs.append)
        engine.scheduler.check_integrity()
        return outputs[-1].num_cached_tokens

    assert [num_cached(), num_cached(cache_salt="a"), num_cached(cache_salt="b")] == [0, 0, 0]
    assert [num_cached(), num_cached(cache_salt="a"), num_cached(cache_salt="b")] == [16, 16, 16]
    id = engine.add_request(PROMPTS[0], fakes.greedy(20, cache_salt="a"))
    for _ in range(4):
        engine.step()
    with pytest.raises(InputError, match="a fork has the cache_salt"):
        engine.fork(id, fakes.greedy(20))
    engine.fork(id, fakes.greedy(20, cache_salt="a"))
    fakes.drain(engine)
