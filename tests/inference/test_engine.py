"""The engine: how requests end, what it refuses, and that one request's trouble stays its own."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import InputError
from inference.engine import Engine
from inference.request import SamplingParams
from inference.scheduling.sequence import Status
from inference.scheduling.step_schedule import ShardSchedule, StepSchedule
from layers import decoder
from layers.ragged import contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama(max_context=128)
VOCAB = MODEL.vocab_size
SETTINGS = {
    "max_seqs": 8,
    "decode_rows": (8,),
    "page_tokens": 8,
    "chunk_tokens": 16,
    "prefill_chunks": (3,),
}
PROMPTS = fakes.prompts((20, 3, 50, 9), VOCAB)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space, byte_ids = False, frozenset()

    def encode(self, text):
        return list(text.encode())

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def make(params=None, shapes="one", **settings):
    return fakes.engine(MODEL, params, shapes, tokenizer=Bytes(), **SETTINGS, **settings)


@pytest.fixture(scope="module")
def undisturbed():
    return make().generate(PROMPTS, fakes.greedy(20))


def assert_idle(engine):
    assert not engine._requests and not engine.scheduler.has_work
    pages = engine.scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
    engine.scheduler.check_integrity()


# --- how a request ends ---------------------------------------------------------------------------


def test_length(undisturbed):
    for completion, prompt in zip(undisturbed, PROMPTS, strict=True):
        assert completion.prompt_token_ids == prompt and completion.finish_reason == "length"
        assert len(completion.token_ids) == len(completion.logprobs) == 20
        assert completion.text == bytes(completion.token_ids).decode(errors="replace")


def test_text_is_encoded_and_streams(undisturbed):
    engine = make()
    assert engine.generate(["abc"], fakes.greedy(5)) == make().generate(
        [[97, 98, 99]], fakes.greedy(5)
    )
    outputs = []
    completion = engine.generate([PROMPTS[0]], fakes.greedy(20), on_output=outputs.append)[0]
    assert "".join(output.text for output in outputs) == completion.text == undisturbed[0].text
    assert sum((output.token_ids for output in outputs), []) == completion.token_ids
    assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]
    streamed = list(engine.stream(PROMPTS[0], fakes.greedy(20)))
    assert [output.text for output in streamed] == [output.text for output in outputs]
    assert_idle(engine)


def test_stop_ids_and_end_tokens(undisturbed):
    tokens = undisturbed[0].token_ids
    end = tokens[4]
    first = tokens.index(end)
    cut = tokens[: first + 1]
    stopped = make().generate([PROMPTS[0]], fakes.greedy(20, stop_token_ids=(end,)))[0]
    assert stopped.token_ids == cut and stopped.finish_reason == "stop"
    assert stopped.text == bytes(cut[:-1]).decode(errors="replace")  # the end itself is not text
    engine = make(eos_ids=(end,))
    assert engine.generate([PROMPTS[0]], fakes.greedy(20))[0].token_ids == cut
    ignored = engine.generate([PROMPTS[0]], fakes.greedy(20, ignore_eos=True))[0]
    assert ignored.token_ids == tokens and ignored.finish_reason == "length"
    assert_idle(engine)


def test_min_tokens_bans_the_end_until_then(undisturbed):
    tokens = undisturbed[0].token_ids
    end = tokens[0]
    params = fakes.greedy(20, min_tokens=6)
    found = make(eos_ids=(end,)).generate([PROMPTS[0]], params)[0].token_ids
    assert len(found) >= 6 and end not in found[:6]
    assert make(eos_ids=(end,)).generate([PROMPTS[0]], fakes.greedy(20))[0].token_ids == [end]


@pytest.mark.parametrize("start, size", [(3, 1), (5, 3), (17, 3)])
def test_stop_strings_across_tokens(undisturbed, start, size):
    text = undisturbed[1].text
    stop = text[start : start + size]
    outputs = []
    engine = make()
    params = fakes.greedy(20, stop=("never there", stop))
    found = engine.generate([PROMPTS[1]], params, outputs.append)[0]
    assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"
    assert "".join(output.text for output in outputs) == found.text
    assert outputs[-1].finish_reason == "stop"
    assert_idle(engine)


def test_the_context_ends_a_request():
    engine = make()
    prompt = fakes.prompts([120], VOCAB)[0]
    found = engine.generate([prompt, prompt + prompt[:7]], fakes.greedy(100))
    assert [len(c.token_ids) for c in found] == [8, 1]
    assert {c.finish_reason for c in found} == {"length"}
    assert len(engine.score([prompt + prompt[:8]])[0].logprobs) == 127
    assert_idle(engine)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, asked, cause",
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([1] * 128, {}, "128 tokens, the context holds 128"),
        ([1] * 129, {"max_new_tokens": 0}, "129 tokens"),
        ([5], {"max_new_tokens": 0}, "at least two tokens"),
        ([1, 131], {}, "token id 131 is not in the vocabulary of 131"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": (10**5000,)}, "token id a number of 16610 bits"),
        ([1], {"banned_token_ids": (131,)}, "token id 131"),
        ([1], {"allowed_token_ids": (-1,)}, "token id -1"),
        ([1], {"logit_bias": ((131, 1.0),)}, "token id 131"),
        ([1], {"logit_bias": tuple((i % 131, 1.0) for i in range(301))}, "at most 300"),
        ([1], {"allowed_token_ids": ()}, "every token is banned"),
        ([1], {"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1)}, "every token is banned"),
        ([1], {"banned_token_ids": tuple(range(131))}, "every token is banned"),
        ([1], {"allowed_token_ids": (7, 9), "min_tokens": 3, "stop_token_ids": (9,)}, "banned"),
        (["a"], {}, "a text or a list of token ids"),
        ([1.5], {}, "a text or a list of token ids"),
        (5, {}, "a text or a list of token ids"),
        (np.ones((2, 2), int), {}, "a text or a list of token ids"),
        ([1], {"presence_penalty": 1.0}, "engine.requests.penalties=true"),
        ([1], {"repetition_penalty": 1.1}, "engine.requests.penalties=true"),
    ],
)
def test_refused_in_one_line(prompt, asked, cause):
    engine = make(eos_ids=(7,))
    with pytest.raises(InputError) as error:
        engine.generate([[1, 2], prompt], [fakes.greedy(4), SamplingParams(**asked)])
    assert cause in str(error.value) and "\n" not in str(error.value)
    assert_idle(engine)  # the good one is not left behind


def test_text_needs_a_tokenizer():
    engine = fakes.engine(MODEL, **SETTINGS)
    with pytest.raises(InputError, match="give token ids"):
        engine.add_request("abc", fakes.greedy(1))
    with pytest.raises(InputError, match="use stop_token_ids"):
        engine.add_request([1], fakes.greedy(1, stop=("a",)))


def test_one_text_is_no_list_of_texts():
    engine = make()
    for call in (engine.generate, engine.score):
        with pytest.raises(InputError, match="one text is given"):
            call("abc")
    with pytest.raises(InputError, match="2 prompts do not go with 1 SamplingParams"):
        engine.generate(["a", "b"], [fakes.greedy(1)])
    assert_idle(engine)


def test_end_tokens_may_be_all_that_is_allowed_unless_banned():
    engine = make(eos_ids=(7,))
    for more in ({}, {"min_tokens": 2, "ignore_eos": True}):
        params = fakes.greedy(2, allowed_token_ids=(7,), **more)
        assert set(engine.generate([[1, 2]], params)[0].token_ids) == {7}


@pytest.mark.parametrize(
    "settings, cause",
    [
        ({"max_seq": 8}, "unknown setting 'max_seq'; valid: dtype, cache_format, max_seqs,"),
        ({"vocab_size": 8}, "unknown setting 'vocab_size'"),
        ({"max_seqs": 1.5}, "engine.max_seqs='1.5': expected int"),
        ({"dtype": "int4"}, "not 'int4'"),
    ],
)
def test_settings_of_a_named_model(settings, cause):
    directory = Path(__file__).parents[1] / "golden" / "llama-tokenizer"
    with pytest.raises(InputError) as error:
        Engine.from_model(str(directory), **settings)
    assert cause in str(error.value)
    engine = Engine.from_model(str(directory), max_seqs=3, decode_rows=(4,), dtype="float32")
    assert (engine.config.engine.max_seqs, engine.config.engine.shapes.decode_rows) == (3, (4,))
    assert engine.config.model.dtype == "float32" and engine.tokenizer is not None


def test_what_cannot_be_forked():
    engine = make()
    scored = engine.add_request(PROMPTS[2], SamplingParams(max_new_tokens=0))
    running = engine.add_request(PROMPTS[1], fakes.greedy(10))
    for _ in range(4):
        engine.step()
    for id, params in [
        (999, fakes.greedy(9)),
        (scored, fakes.greedy(9)),
        (running, fakes.greedy(0)),
    ]:
        with pytest.raises(InputError):
            engine.fork(id, params)
    generated = fakes.sequence_of(engine, running).num_output_tokens
    with pytest.raises(InputError, match="max_new_tokens is more"):
        engine.fork(running, fakes.greedy(generated))
    fakes.drain(engine)
    assert_idle(engine)


# --- beside others --------------------------------------------------------------------------------


def test_abort_and_leaving_a_stream():
    engine = make()
    engine.abort(12345)
    for steps in range(4):  # queued, prefilling, decoding
        id = engine.add_request(PROMPTS[2], fakes.greedy(30))
        for _ in range(steps):
            engine.step()
        engine.abort(id)
        engine.abort(id)
        assert_idle(engine)
    for output in engine.stream(PROMPTS[0], fakes.greedy(30)):
        assert output.token_ids
        break
    assert_idle(engine)


def test_streams_read_in_turn_lose_nothing(undisturbed):
    engine = make()
    streams = [engine.stream(prompt, fakes.greedy(20)) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    while None not in (outputs := [next(stream, None) for stream in streams]):
        texts = [text + output.text for text, output in zip(texts, outputs, strict=True)]
    beside = engine.generate([PROMPTS[2]], fakes.greedy(20))  # while a stream may still be open
    for index, stream in enumerate(streams):
        texts[index] += "".join(output.text for output in [outputs[index], *stream] if output)
    assert texts == [completion.text for completion in undisturbed[:2]]
    assert beside[0].text == undisturbed[2].text
    assert_idle(engine)


def test_a_fork_continues_its_parents_text(undisturbed):
    engine = make()
    parent = engine.add_request(PROMPTS[0], fakes.greedy(20))
    texts = {parent: ""}
    for step in range(40):
        if step == 6:
            prefix = texts[parent]
            child = engine.fork(parent, fakes.greedy(20))
            texts[child] = ""
        for output in engine.step():
            texts[output.id] += output.text
    assert texts[parent] == undisturbed[0].text == prefix + texts[child]
    assert_idle(engine)


def test_a_seed_names_the_tokens():
    params = [
        SamplingParams(max_new_tokens=15, temperature=1.5, top_p=p, seed=seed)
        for seed, p in [(3, 1.0), (-3, 0.9), (2**64 - 1, 1.0), (3, 1.0)]
    ]
    engine = make()
    together = [c.token_ids for c in engine.generate([PROMPTS[0]] * 4, params)]
    assert together[0] == together[3] and len({tuple(tokens) for tokens in together}) == 3
    for own, tokens in zip(params, together, strict=True):
        neighbours = [SamplingParams(max_new_tokens=9, temperature=0.8)] * 3
        found = engine.generate([*PROMPTS[1:], PROMPTS[0]], [*neighbours, own])
        assert found[-1].token_ids == tokens


def test_the_engines_seed_names_all_requests():
    params = SamplingParams(max_new_tokens=15, temperature=1.5)

    def run(seed):
        engine = make(seed=seed)
        return [c.token_ids for c in engine.generate([PROMPTS[0]] * 2, params)]

    assert run(1) == run(1) and len({tuple(t) for t in run(1) + run(2) + run(None)}) == 6


# --- trouble --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poison(undisturbed):
    """A token that occurs nowhere else."""
    used = {token for c in undisturbed for token in (*c.prompt_token_ids, *c.token_ids)}
    return min(set(range(VOCAB)) - used)


@pytest.fixture(scope="module")
def poisoned(poison):
    params = fakes.real_params(MODEL)
    table = params["embed"]["table"].at[poison].set(np.nan)
    return params | {"embed": {"table": table}}


@pytest.mark.parametrize("position", [0, 17, 39])
def test_a_nan_ends_its_own_request(poisoned, poison, undisturbed, position):
    engine = make(poisoned)
    bad = fakes.prompts([40], VOCAB, seed=5)[0]
    bad = [t if t != poison else 0 for t in bad]
    bad[position] = poison
    found = engine.generate([PROMPTS[0], bad, *PROMPTS[1:]], fakes.greedy(20))
    failed = found.pop(1)
    assert failed.finish_reason == "error" and failed.token_ids == []
    assert [c.token_ids for c in found] == [c.token_ids for c in undisturbed]
    assert_idle(engine)
    # Pages are handed out last in, first out: these get the ones with the NaN.
    again = engine.generate(PROMPTS, fakes.greedy(20))
    assert [(c.token_ids, c.logprobs) for c in again] == [
        (c.token_ids, c.logprobs) for c in make().generate(PROMPTS, fakes.greedy(20))
    ]
    with pytest.raises(InputError, match="non-finite logits for text 1"):
        engine.score([PROMPTS[0], [*bad, 1]])
    assert_idle(engine)


def test_a_lost_cache_is_computed_again(undisturbed, monkeypatch):
    engine = make()
    launch, calls = engine.model_runner.launch, []

    def fail_twice(schedule, arrays):
        calls.append(schedule)
        if len(calls) in (2, 9):
            for leaf in jax.tree.leaves((engine.model_runner.cache, engine.model_runner.slots)):
                leaf.delete()
            raise jax.errors.JaxRuntimeError("the device went away")
        return launch(schedule, arrays)

    monkeypatch.setattr(engine.model_runner, "launch", fail_twice)
    found = engine.generate(PROMPTS, fakes.greedy(20))
    assert [c.token_ids for c in found] == [c.token_ids for c in undisturbed]
    scored = PROMPTS[2] + PROMPTS[0] + PROMPTS[2]
    expected = make().score([scored])[0].logprobs
    calls.clear()
    np.testing.assert_allclose(engine.score([scored])[0].logprobs, expected, atol=1e-4)
    assert_idle(engine)


def test_a_failure_that_stays_is_raised(monkeypatch):
    engine = make()

    def fail(schedule, arrays):
        raise jax.errors.JaxRuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, "launch", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
            engine.generate([PROMPTS[0]], fakes.greedy(5))
    assert_idle(engine)
    assert engine.generate([PROMPTS[0]], fakes.greedy(5))


@pytest.mark.parametrize("call", ["generate", "score", "stream"])
def test_an_interrupted_call_leaves_nothing_behind(call, undisturbed, monkeypatch):
    """Not even a cache that was donated to the step that was interrupted."""
    engine, calls = make(), []
    launch = engine.model_runner.launch

    def interrupt(schedule, arrays):
        calls.append(schedule)
        if len(calls) < 3:
            return launch(schedule, arrays)
        for leaf in jax.tree.leaves((engine.model_runner.cache, engine.model_runner.slots)):
            leaf.delete()
        raise KeyboardInterrupt

    prompts = [prompt * 6 for prompt in PROMPTS[:2]]
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            if call == "generate":
                engine.generate(prompts, fakes.greedy(20))
            elif call == "score":
                engine.score(prompts)
            else:
                list(engine.stream(PROMPTS[0], fakes.greedy(20)))
    assert len(calls) == 3
    assert_idle(engine)
    found = engine.generate(PROMPTS, fakes.greedy(20))
    assert [c.token_ids for c in found] == [c.token_ids for c in undisturbed]


def test_a_callers_own_error_leaves_nothing_behind():
    engine = make()

    def stop(output):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, fakes.greedy(20), on_output=stop)
    assert_idle(engine)


def test_steps_are_timed_without_compilation():
    """Every executable is compiled anew here, which takes a hundred times as long as a step."""
    fakes.forget_programs()
    with fakes.slow_compiler(0.5):
        engine = make()
        engine.generate([PROMPTS[1]], fakes.greedy(3))
    seconds, compiled = [record.seconds for record in engine.records], engine.compile_s
    assert len(seconds) == 3 and max(seconds) < compiled / 4
    engine.generate([PROMPTS[1]], fakes.greedy(3))
    assert engine.compile_s - compiled < compiled / 20


# --- penalties and alternatives -------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_logits():
    """The model's logits after a text, without a cache."""
    params = fakes.real_params(MODEL)

    @compiling.jit
    def run(tokens_T):
        hidden_TD, _ = decoder.forward(params, MODEL, tokens_T, contiguous(1, 128))
        return decoder.logits(params, MODEL, hidden_TD)

    def last(tokens):
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(padded))[len(tokens) - 1].astype(np.float64)

    return last


def penalized(own_logits, prompt, params):
    """Greedy tokens, log-probabilities and the two most likely alternatives, in numpy."""
    tokens, logprobs, tops = list(prompt), [], []
    for _ in range(params.max_new_tokens):
        x = own_logits(tokens)
        logp = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        counts = np.bincount(tokens[len(prompt) :], minlength=VOCAB)
        seen = np.isin(np.arange(VOCAB), tokens)
        x = np.where(seen, np.where(x < 0, x * (r := params.repetition_penalty), x / r), x)
        x = x - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
        tokens.append(int(x.argmax()))
        logprobs.append(logp[tokens[-1]])
        tops.append(np.argsort(-logp)[:2].tolist())
    return tokens[len(prompt) :], logprobs, tops


def make_penalizing(params=None):
    """Small: four prompts with their continuations do not fit at once."""
    settings = SETTINGS | {"cache_bytes": 16 * 8 * 32 * 4 * 2}
    settings |= {"penalties": True, "num_drafts": 2, "top_logprobs": 2}
    return fakes.engine(MODEL, params, "one", **settings)


PENALTIES = [
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9, "presence_penalty": -0.3, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("drafts", [False, True])
def test_penalties_survive_preemption_fork_and_drafts(own_logits, drafts, monkeypatch):
    engine = make_penalizing()
    preempted, preempt = [], engine.scheduler.preempt
    monkeypatch.setattr(engine.scheduler.shards[0].admission_control, "will_fit", lambda *_: True)
    monkeypatch.setattr(engine.scheduler, "preempt", lambda s: (preempted.append(s), preempt(s)))
    rng = np.random.default_rng(0)
    requests, known = [], {}
    for prompt, asked in zip(PROMPTS, PENALTIES, strict=True):
        params = fakes.greedy(40, **asked)
        sequence = fakes.sequence_of(engine, engine.add_request(prompt, params))
        known[tuple(prompt)] = penalized(own_logits, prompt, params)
        requests.append((sequence, known[tuple(prompt)]))
    forked = False

    def disturb():
        nonlocal forked
        for sequence in engine.scheduler.running if drafts else ():
            tokens = known[tuple(sequence.tokens[: sequence.num_prompt_tokens])][0]
            after = tokens[sequence.num_output_tokens :][:2]
            wrong = rng.random(2) < 0.3
            sequence.drafts = tuple(int(t + w) % VOCAB for t, w in zip(after, wrong, strict=False))
        first, expected = requests[1]
        if not forked and first.num_output_tokens > 10 and first.status is Status.RUNNING:
            child = fakes.sequence_of(engine, engine.fork(first.id, first.params))
            requests.append((child, expected))
            forked = True

    fakes.drain(engine, disturb)
    assert preempted and forked
    for sequence, (tokens, logprobs, tops) in requests:
        assert sequence.output_tokens == tokens
        np.testing.assert_allclose(sequence.results.logprobs, logprobs, atol=1e-4)
        assert [list(ids) for ids, _ in sequence.results.top_logprobs] == tops
    assert len({tuple(tokens) for _, (tokens, _, _) in requests}) == 4
    assert_idle(engine)


def test_a_rejected_draft_may_be_a_nan(poisoned, poison, undisturbed):
    """Its logits are no one's, and its page entry is written over."""
    engine = make_penalizing(poisoned)
    sequences = [
        fakes.sequence_of(engine, engine.add_request(prompt, fakes.greedy(20)))
        for prompt in PROMPTS
    ]

    def propose():
        for sequence in engine.scheduler.running:
            sequence.drafts = (poison,) * 2

    fakes.drain(engine, propose)
    assert [s.output_tokens for s in sequences] == [c.token_ids for c in undisturbed]


def test_alternatives_are_reported(own_logits):
    engine = make_penalizing()
    completion = engine.generate([PROMPTS[0]], fakes.greedy(6))[0]
    text = PROMPTS[0] + completion.token_ids
    score = engine.score([text])[0]
    assert score.top_logprobs[-6:] == [
        pytest.approx(top, abs=1e-4) for top in completion.top_logprobs
    ]
    assert len(score.top_logprobs) == len(score.logprobs) == len(text) - 1
    for at, (token, logprob) in enumerate(zip(text[1:], score.logprobs, strict=True)):
        x = own_logits(text[: at + 1])
        assert math.isclose(logprob, x[token] - np.logaddexp.reduce(x), abs_tol=1e-4)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_step_is_scheduled_while_the_device_runs(overlap, monkeypatch):
    """With overlap the next step is launched before the host waits for one."""
    engine, order = make(overlap=overlap), []
    engine.warm_up()

    def told(name):
        call = getattr(engine.model_runner, name)
        return lambda *arguments: (order.append(name), call(*arguments))[1]

    for name in ("launch", "wait"):
        monkeypatch.setattr(engine.model_runner, name, told(name))
    engine.generate([PROMPTS[0]], fakes.greedy(4))
    both = ["launch", "wait"]
    assert order == (["launch", *both * 3, "wait"] if overlap else both * 4)


def test_warm_up_runs_every_shape_once_and_disturbs_nobody(monkeypatch):
    """The first run of an executable is slower than the others: no request is to wait for it."""
    engine, schedules = make(shapes="riding"), []
    runner, launch = engine.model_runner, engine.model_runner.launch
    ids = [engine.add_request(prompt, fakes.greedy(8)) for prompt in PROMPTS]
    outputs = [output for _ in range(3) for output in engine.step()]
    with monkeypatch.context() as patch:
        seen = lambda *both: (schedules.append(both[0]), launch(*both))  # noqa: E731
        patch.setattr(runner, "launch", lambda *both: seen(*both)[1])
        engine.warm_up()
    shapes = engine.scheduler.shapes
    idle = {StepSchedule(shape, (ShardSchedule(),)) for shape in shapes}
    assert len(schedules) == len(shapes) and set(schedules) == idle
    while engine.scheduler.has_work:
        outputs += engine.step()
    for id, completion in zip(ids, make().generate(PROMPTS, fakes.greedy(8)), strict=True):
        tokens = [token for output in outputs if output.id == id for token in output.token_ids]
        assert tokens == completion.token_ids


def test_other_weights_are_cached_anew():
    engine = make()
    engine.generate([PROMPTS[0]], fakes.greedy(4))
    engine.update_params(other := jax.tree.map(lambda x: x * 1.5, engine.model_runner.params))
    (found,) = engine.generate([PROMPTS[0]], fakes.greedy(8))
    assert engine.scheduler.counters.num_cached_tokens == 0
    assert found.token_ids == make(other).generate([PROMPTS[0]], fakes.greedy(8))[0].token_ids
    with pytest.raises(InputError, match="parameters of this model"):
        engine.update_params({"embed": other["embed"]})
