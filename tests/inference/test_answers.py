"""Many answers to one prompt: each as if it had been asked for alone, on pages that are shared."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from configs.errors import InputError
from inference.request import SamplingParams, derived_seed
from layers import decoder
from layers.ragged import contiguous
from tests import fakes

MODEL = fakes.llama(max_context=256)
VOCAB = MODEL.vocab_size
SETTINGS = {
    "max_seqs": 8,
    "decode_rows": (8,),
    "tile_tokens": 32,
    "prefill_tiles": (3,),
    "deterministic": True,
    "top_logprobs": 12,
}
PROGRAMS: dict = {}  # one set for all engines here: what their settings change is the host's
PROMPT = fakes.prompts([200], VOCAB)[0]
DRAWN = SamplingParams(max_new_tokens=12, temperature=1.3, seed=7)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space = False

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def make(**settings):
    engine = fakes.engine(MODEL, tokenizer=Bytes(), **SETTINGS | settings)
    engine.executor._compiled = PROGRAMS
    return engine


def make_fake(**settings):
    """Pages, a window, recurrent states; room for one and a half full sequences."""
    settings = {
        "max_seqs": 4, "decode_rows": (4,), "page_tokens": 4, "cache_bytes": 2800,
        "tile_tokens": 4, "prefill_tiles": (3,), "top_logprobs": 6,
    } | settings  # fmt: skip
    return fakes.engine(fakes.fake_model(), **settings)


def assert_empty(engine):
    pages = engine.scheduler.pages
    assert pages.prefix.num_available_pages == pages.pool.num_usable_pages
    assert not (engine._answers or engine._sequences or engine._detokenizers)
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def each(completion):
    """Tokens, log-probabilities, text and reason of each answer, in order."""
    answers = (completion, *completion.others)
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in answers]


def run(engine, prompt, params, before_step=lambda: None):
    """A request step by step, the books checked after each."""
    answers = engine._answers[engine.add_request(prompt, params)]
    fakes.drain(engine, before_step)
    return answers.completion()


def stirrer(engine, chance, seed=0):
    """Preempts somebody at random before a step."""
    rng = np.random.default_rng(seed)

    def stir():
        running = engine.scheduler.running
        if running and rng.random() < chance:
            engine.scheduler.preempt(running[rng.integers(len(running))])

    return stir


# --- n and best_of --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """Eight requests of one answer, with the seeds of one request's eight."""
    params = [dataclasses.replace(DRAWN, seed=derived_seed(7, index)) for index in range(8)]
    return [each(c)[0] for c in make().generate([PROMPT] * 8, params)]


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"overlap": False}])
def test_each_answer_is_that_of_a_request_with_its_seed(settings, alone):
    engine = make(**settings)
    before = engine.scheduler.counters.num_prefilled_tokens
    found = run(engine, PROMPT, dataclasses.replace(DRAWN, n=8))
    assert each(found) == alone and len({tuple(tokens) for tokens, *_ in alone}) == 8
    prefilled = engine.scheduler.counters.num_prefilled_tokens - before
    assert prefilled == len(PROMPT) - 1  # once for all
    assert_empty(engine)


def test_answers_share_their_prompts_pages():
    engine, shares = make(), []

    def look():
        running = engine.scheduler.running
        if len(running) == 8:
            shares.append(engine.scheduler.pages.prompt_use(running))

    run(engine, PROMPT, dataclasses.replace(DRAWN, n=8), look)
    assert set(shares) == {(8 * 13, 12 + 8)}  # the 13th page holds the tokens generated first
    assert 1 - 20 / 104 >= 0.75


def test_best_of_returns_the_most_likely(alone):
    asked = dataclasses.replace(DRAWN, n=3, best_of=8)
    updates = []
    found = make().generate([PROMPT], asked, updates.append)[0]
    ranked = sorted(alone, key=lambda answer: -np.mean(answer[1]))
    assert each(found) == ranked[:3]
    assert [(u.id, u.index, u.token_ids, u.text, u.finish_reason) for u in updates] == [
        (found.id, index, tokens, text, reason)
        for index, (tokens, _, text, reason) in enumerate(ranked[:3])
    ]


def test_news_name_their_answer(alone):
    engine, texts, ends = make(), [""] * 3, set()
    for update in engine.stream(PROMPT, dataclasses.replace(DRAWN, n=3)):
        assert update.index not in ends
        texts[update.index] += update.text
        if update.finish_reason:
            ends.add(update.index)
    assert texts == [text for _, _, text, _ in alone[:3]] and ends == {0, 1, 2}
    assert_empty(engine)


def test_answers_end_each_by_itself(alone):
    stop = alone[0][0][3]
    found = each(make().generate([PROMPT], dataclasses.replace(DRAWN, n=8, stop_ids=(stop,)))[0])
    for (tokens, _, _, reason), (whole, *_) in zip(found, alone, strict=True):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert tokens == cut and reason == ("stop" if stop in whole else "length")


@pytest.mark.parametrize("length", [1, 2, 33])
def test_short_prompts_and_prompts_known_before(length):
    """All of a prompt but its last token may be in the cache already."""
    engine, prompt = make(), PROMPT[:length]
    params = [dataclasses.replace(DRAWN, seed=derived_seed(7, index)) for index in range(3)]
    expected = [each(c)[0] for c in engine.generate([prompt] * 3, params)]
    assert each(run(engine, prompt, dataclasses.replace(DRAWN, n=3))) == expected
    assert_empty(engine)


def test_many_answers_in_little_room():
    """Three requests of four answers on four slots and too few pages, with recurrent states."""
    prompts, params = fakes.prompts([21, 4, 13]), SamplingParams(max_new_tokens=20, n=4)
    for chance in (0.0, 0.3):
        engine = make_fake()
        requests = [engine._answers[engine.add_request(prompt, params)] for prompt in prompts]
        fakes.drain(engine, stirrer(engine, chance))
        for prompt, answers in zip(prompts, requests, strict=True):
            found = [tokens for tokens, *_ in each(answers.completion())]
            assert found == [fakes.continuation(prompt, 20)] * 4
        assert engine.scheduler.counters.num_preemptions
        assert_empty(engine)


# --- beam search ----------------------------------------------------------------------------------


def search(candidates, prompt, params, ends, limit):
    """A plain beam search: hypotheses as (score, tokens), best first.

    `candidates(tokens)` are the next tokens' log-probabilities.
    """
    width, penalty = params.beam_width, params.length_penalty
    beams, found = [(0.0, [])], []
    for length in range(1, limit + 1):
        steps = sorted(
            (
                (total + logprob, [*tokens, token])
                for total, tokens in beams
                for token, logprob in enumerate(candidates([*prompt, *tokens]))
            ),
            key=lambda step: -step[0],
        )
        for total, tokens in steps[:width]:
            if tokens[-1] in ends or length == limit:
                found.append((total / length**penalty, tokens))
        found = sorted(found, key=lambda one: -one[0])[:width]
        beams = [step for step in steps if step[1][-1] not in ends][:width]
        if len(found) == width:
            if params.early_stopping or beams[0][0] / length**penalty <= found[-1][0]:
                break
    return found[: params.n]


STARTS = fakes.prompts([21, 9, 30], VOCAB, seed=4)
ENDS = tuple(range(5, VOCAB, 16))


@functools.cache
def dense():
    """The model's log-probabilities after a text, without a cache."""
    params = fakes.real_params(MODEL)

    @jax.jit
    def forward(tokens_T):
        hidden_TD, _ = decoder.forward(params, MODEL, tokens_T, contiguous(1, 48))
        return jax.nn.log_softmax(decoder.logits(params, MODEL, hidden_TD))

    @functools.cache
    def known(tokens):
        padded = np.zeros(48, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(forward(padded))[len(tokens) - 1].astype(np.float64).tolist()

    return lambda tokens: known(tuple(tokens))


def beams(width, n=None, num_tokens=12, **more):
    n = width if n is None else n
    return SamplingParams(max_new_tokens=num_tokens, beam_width=width, n=n, **more)


def assert_hypotheses(completion, expected, ends=ENDS):
    answers = (completion, *completion.others)
    assert [answer.token_ids for answer in answers] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([a.score for a in answers], [s for s, _ in expected], atol=1e-4)
    for answer in answers:
        is_end = answer.token_ids[-1] in ends
        assert answer.finish_reason == ("stop" if is_end else "length")
        assert answer.text == bytes(answer.token_ids[: -1 if is_end else None]).decode(
            errors="replace"
        )
        assert len(answer.logprobs) == len(answer.top_logprobs) == len(answer.token_ids)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_beam_search_is_the_plain_one(early_stopping):
    """Nine searches side by side on eight slots, which wait for each other's room."""
    engine, lengths, reasons = make(), set(), set()
    cases = list(itertools.product(STARTS, (1, 2, 4), (0.6, 1.0, 1.5)))
    asked = [
        beams(width, length_penalty=penalty, early_stopping=early_stopping, stop_ids=ENDS)
        for _, width, penalty in cases
    ]
    found = engine.generate([prompt for prompt, _, _ in cases], asked)
    for (prompt, _, _), params, completion in zip(cases, asked, found, strict=True):
        assert_hypotheses(completion, search(dense(), prompt, params, ENDS, 12))
        lengths |= {len(c.token_ids) for c in (completion, *completion.others)}
        reasons |= {c.finish_reason for c in (completion, *completion.others)}
    assert len(lengths) > 4 and reasons == {"stop", "length"}
    assert_empty(engine)


def test_one_beam_is_greedy():
    engine = make()
    greedy = engine.generate(STARTS, fakes.greedy(12, stop_ids=ENDS))
    found = engine.generate(STARTS, beams(1, stop_ids=ENDS))
    assert [each(c) for c in found] == [each(c) for c in greedy]


def test_beams_share_their_pages():
    engine, shares = make(), []

    def look():
        running = engine.scheduler.running
        if len(running) == 4:
            shares.append(engine.scheduler.pages.prompt_use(running))

    run(engine, PROMPT, beams(4), look)
    assert len(shares) > 8 and all(held == 4 * 13 for held, _ in shares)
    assert all(1 - distinct / held >= 0.37 for held, distinct in shares)


def law(history):
    """The fake model's log-probabilities, by hand."""
    total, v = fakes.next_token(history), np.arange(fakes.VOCAB)
    rms = np.sqrt((history[-1] ** 2 + 1 + total**2) / 4)
    x = (2 * v * total - v * v) / rms
    return x - np.logaddexp.reduce(x)


@functools.cache
def undisturbed(overlap=True):
    engine = make_fake(cache_bytes=1 << 20, overlap=overlap)
    prompts = fakes.prompts([21, 4, 13])
    return [each(c) for c in engine.generate(prompts, beams(4, num_tokens=20))]


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"prefix_cache": False}])
def test_searches_survive_preemption(settings):
    """Three searches that fit one at a time, whose beams are thrown out at random too; every
    token's log-probability tells whether pages, window and state were those of its beam.
    """
    prompts = fakes.prompts([21, 4, 13])
    for chance in (0.0, 0.2):
        engine = make_fake(cache_bytes=3600, **settings)
        requests = [
            engine._answers[engine.add_request(p, beams(4, num_tokens=20))] for p in prompts
        ]
        fakes.drain(engine, stirrer(engine, chance), limit=8000)
        for prompt, answers, expected in zip(prompts, requests, undisturbed(), strict=True):
            completion = answers.completion()
            assert each(completion) == expected
            for answer in (completion, *completion.others):
                for at, (token, logprob) in enumerate(
                    zip(answer.token_ids, answer.logprobs, strict=True)
                ):
                    history = [*prompt, *answer.token_ids[:at]]
                    assert logprob == pytest.approx(law(history)[token], abs=1e-3)
        assert_empty(engine)
