"""Many answers to one prompt: each as if it had been asked for alone, on pages that are shared."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import InputError
from inference.checkpoints import resolve
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
PROMPT = fakes.prompts([200], VOCAB)[0]
DRAWN = SamplingParams(max_new_tokens=12, temperature=1.3, seed=7)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space = False

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def make(**settings):
    return fakes.engine(MODEL, tokenizer=Bytes(), **SETTINGS | settings)


def make_fake(**settings):
    """Pages, a window, recurrent states; six slots, room for four sequences at their longest."""
    settings = {
        "max_seqs": 6, "decode_rows": (6,), "page_tokens": 4, "cache_bytes": 3850,
        "max_context": 48, "tile_tokens": 4, "prefill_tiles": (3,), "top_logprobs": 6,
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


@pytest.mark.quick_code
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
        assert bool(engine.scheduler.counters.num_preemptions) == bool(chance)
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
        is_worse = beams[0][0] / length**penalty <= min(score for score, _ in [*found, (1, 0)])
        if len(found) == width and (params.early_stopping or is_worse):
            break
    return found[: params.n]


STARTS = fakes.prompts([21, 9, 30], VOCAB, seed=4)
ENDS = (110, 16, 73, 9, 3, 100)  # which the likeliest texts come by


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


@pytest.mark.quick_code
def test_beam_search_is_that_of_transformers():
    """Whose hypotheses, by `generate` in float32, are stored beside the checkpoint."""
    directory = Path(__file__).parents[2] / "golden" / "llama-gqa-tied-rope3"
    checkpoint = resolve.resolve(str(directory)).open(None)
    with np.load(directory / "expected.npz") as arrays:
        golden = {name: arrays[name].tolist() for name in arrays.files if name.startswith("beam_")}
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    engine = fakes.engine(
        model, checkpoint.load_params(decoder.param_infos(model), None),
        eos_ids=golden["beam_ends"], **SETTINGS | {"top_logprobs": 16},
    )  # fmt: skip
    asked = [
        beams(4, num_tokens=16, length_penalty=round(penalty, 3), early_stopping=bool(early))
        for penalty, early in golden["beam_settings"]
    ]
    found = engine.generate(golden["beam_prompts"], asked)
    for completion, tokens, scores in zip(
        found, golden["beam_tokens"], golden["beam_scores"], strict=True
    ):
        expected = [
            (score, [token for token in own if token >= 0])
            for score, own in zip(scores, tokens, strict=True)
        ]
        assert [(c.score, c.token_ids) for c in (completion, *completion.others)] == [
            (pytest.approx(score, abs=1e-4), own) for score, own in expected
        ]


def law(history):
    """The fake model's log-probabilities, by hand."""
    total, v = fakes.next_token(history), np.arange(fakes.VOCAB)
    rms = np.sqrt((history[-1] ** 2 + 1 + total**2) / 4)
    x = (2 * v * total - v * v) / rms
    return x - np.logaddexp.reduce(x)


@pytest.fixture(scope="module")
def undisturbed():
    """Three searches, one after the other."""
    engine, prompts = make_fake(), fakes.prompts([21, 4, 13])
    found = [(prompt, each(run(engine, prompt, beams(4, num_tokens=20)))) for prompt in prompts]
    assert not engine.scheduler.counters.num_preemptions
    return found


@pytest.mark.quick_code
def test_a_search_follows_the_model(undisturbed):
    """A token's log-probability tells whether pages, window and state were those of its beam."""
    for prompt, answers in undisturbed:
        for tokens, logprobs, _, _ in answers:
            for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                expected = law([*prompt, *tokens[:at]])[token]
                assert logprob == pytest.approx(expected, abs=1e-3)


@pytest.mark.quick_code
@pytest.mark.parametrize(
    "settings", [{}, {"overlap": False}, {"prefix_cache": False}, {"policy": "static"}]
)
def test_searches_survive_preemption(settings, undisturbed):
    """All at once, on slots for one and a half; then with beams thrown out at random."""
    for chance in (0.0, 0.2):
        engine = make_fake(**settings)
        requests = [
            engine._answers[engine.add_request(prompt, beams(4, num_tokens=20))]
            for prompt, _ in undisturbed
        ]
        fakes.drain(engine, stirrer(engine, chance))
        assert [each(answers.completion()) for answers in requests] == [
            answers for _, answers in undisturbed
        ]
        assert engine.scheduler.counters.num_preemptions or not chance
        assert_empty(engine)


@pytest.mark.quick_code
def test_a_lost_cache_and_an_abort_amid_many_answers(undisturbed):
    """Requests of every kind are aborted in every state; the others go on as if alone."""
    sampled = SamplingParams(max_new_tokens=20, n=3, best_of=4)
    rng, engine = np.random.default_rng(3), make_fake()
    kept = [
        engine._answers[engine.add_request(prompt, beams(4, num_tokens=20))]
        for prompt, _ in undisturbed
    ]
    doomed = []

    def disturb():
        if len(doomed) < 12 and rng.random() < 0.3:
            params = [sampled, beams(3, num_tokens=20)][len(doomed) % 2]
            doomed.append(engine._answers[engine.add_request([1, 2, 3, 4, 5, 6], params)])
        for answers in doomed:
            if rng.random() < 0.1:
                engine.abort(answers.id)
                assert answers.completion().finish_reason in ("abort", "length")
        if rng.random() < 0.03:
            engine.rebuild()

    fakes.drain(engine, disturb)
    assert [each(answers.completion()) for answers in kept] == [each_ for _, each_ in undisturbed]
    assert_empty(engine)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, cause",
    [
        ({"n": 0}, "n is a whole number from 1 on"),
        ({"n": 1.5}, "n is a whole number"),
        ({"n": 3, "best_of": 2}, "n is at most best_of=2, not 3"),
        ({"best_of": 0}, "best_of is a whole number from 1 on, not 0"),
        ({"beam_width": -1}, "beam_width is a whole number from 0"),
        ({"n": 3, "beam_width": 2}, "n is at most beam_width=2, not 3"),
        ({"beam_width": 2, "temperature": 1.0}, "beam_width takes no temperature"),
        ({"beam_width": 2, "best_of": 2}, "beam_width takes no temperature"),
        ({"beam_width": 2, "stop": ("a",)}, "beam_width takes no temperature"),
        ({"length_penalty": float("nan")}, "length_penalty is a number from -10 to 10"),
        ({"early_stopping": "never"}, "early_stopping is true or false, not 'never'"),
        ({"n": 2, "max_new_tokens": 0}, "leave n=1"),
        ({"n": 9}, "n is at most engine.max_seqs=8, not 9"),
        ({"best_of": 9}, "best_of is at most engine.max_seqs=8, not 9"),
        ({"beam_width": 9}, "beam_width is at most engine.max_seqs=8, not 9"),
        ({"beam_width": 8, "stop_ids": (1, 2, 3, 4, 5)}, "engine.top_logprobs of at least 13"),
    ],
)
def test_refused_in_one_line(asked, cause):
    engine = make()
    with pytest.raises(InputError) as error:
        engine.generate([[1, 2], [3]], [fakes.greedy(4), SamplingParams(**asked)])
    assert cause in str(error.value) and "\n" not in str(error.value)
    assert_empty(engine)


def test_what_has_several_answers_is_not_forked():
    engine = make()
    for params, own in [(beams(2), fakes.greedy(9)), (fakes.greedy(9), beams(2))]:
        with pytest.raises(InputError, match="leave n=1"):
            engine.fork(engine.add_request([1, 2], params), own)
    with pytest.raises(InputError, match="4 beams of 41 tokens never fits"):
        make_fake(cache_bytes=2000).add_request([1] * 21, beams(4, num_tokens=20))


def test_a_nan_ends_every_answer_of_its_prompt():
    params = fakes.real_params(MODEL)
    table = params["embed"]["table"].at[130].set(np.nan)
    engine = make()
    engine.executor.params = params | {"embed": {"table": table}}
    asked = [dataclasses.replace(DRAWN, n=3), dataclasses.replace(DRAWN, n=2, best_of=3), beams(2)]
    for completion in engine.generate([[130, *range(40)]] * 3, asked):
        assert {reason for *_, reason in each(completion)} == {"error"}
    assert_empty(engine)
