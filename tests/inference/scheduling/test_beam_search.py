"""Beam search: the hypotheses of a plain one and of transformers, on pages that beams share."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from inference.checkpoints import resolve
from inference.request import SamplingParams
from layers import decoder
from layers.ragged import contiguous
from tests import compiling, fakes
from tests.inference.scheduling.test_sequence_group import (
    MODEL,
    PROMPT,
    SETTINGS,
    VOCAB,
    assert_empty,
    beams,
    each,
    make,
    make_fake,
    run,
    stirrer,
)

pytestmark = pytest.mark.quick_code


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

    @compiling.jit
    def forward(tokens_T):
        hidden_TD, _ = decoder.forward(params, MODEL, tokens_T, contiguous(1, 48))
        return jax.nn.log_softmax(decoder.logits(params, MODEL, hidden_TD))

    @functools.cache
    def known(tokens):
        padded = np.zeros(48, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(forward(padded))[len(tokens) - 1].astype(np.float64).tolist()

    return lambda tokens: known(tuple(tokens))


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
        beams(width, length_penalty=penalty, early_stopping=early_stopping, stop_token_ids=ENDS)
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
    greedy = engine.generate(STARTS, fakes.greedy(12, stop_token_ids=ENDS))
    completions = engine.generate(STARTS, beams(1, stop_token_ids=ENDS))
    assert [each(c) for c in completions] == [each(c) for c in greedy]


def test_beams_share_their_pages():
    engine, shares = make(), []

    def look():
        running = engine.scheduler.running
        if len(running) == 4:
            shares.append(engine.scheduler.shards[0].pages.prompt_usage(running))

    run(engine, PROMPT, beams(4), look)
    assert len(shares) > 8 and all(held == 4 * 13 for held, _ in shares)
    assert all(1 - distinct / held >= 0.37 for held, distinct in shares)


def test_beam_search_is_that_of_transformers():
    """Whose hypotheses, by `generate` in float32, are stored beside the checkpoint."""
    directory = Path(__file__).parents[2] / "golden" / "llama-gqa-tied-rope3"
    checkpoint = resolve.resolve(str(directory)).open(None)
    with np.load(directory / "expected.npz") as arrays:
        golden = {name: arrays[name].tolist() for name in arrays.files if name.startswith("beam_")}
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    engine = fakes.engine(
        model, checkpoint.load_params(decoder.param_infos(model), None), "one", False,
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


def test_a_search_follows_the_model(undisturbed):
    """A token's log-probability tells whether pages, window and state were those of its beam."""
    for prompt, answers in undisturbed:
        for tokens, logprobs, _, _ in answers:
            for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                expected = law([*prompt, *tokens[:at]])[token]
                assert logprob == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": False}, {"prefix_cache": False}, {"policy": "static"}]
)
def test_searches_survive_preemption(settings, undisturbed):
    """All at once, on slots for one and a half; then with beams thrown out at random."""
    for chance in (0.0, 0.2):
        engine = make_fake(**settings)
        requests = [
            engine._requests[engine.add_request(prompt, beams(4, num_tokens=20))].group
            for prompt, _ in undisturbed
        ]
        fakes.drain(engine, stirrer(engine, chance))
        assert [each(answers.completion()) for answers in requests] == [
            answers for _, answers in undisturbed
        ]
        assert engine.scheduler.counters.num_preemptions or not chance
        assert_empty(engine)


def test_a_lost_cache_and_an_abort_amid_many_answers(undisturbed):
    """Requests of every kind are aborted in every state; the others go on as if alone."""
    sampled = SamplingParams(max_new_tokens=20, n=3, best_of=4)
    rng, engine = np.random.default_rng(3), make_fake()
    kept = [
        engine._requests[engine.add_request(prompt, beams(4, num_tokens=20))].group
        for prompt, _ in undisturbed
    ]
    doomed = []

    def disturb():
        if len(doomed) < 12 and rng.random() < 0.3:
            params = [sampled, beams(3, num_tokens=20)][len(doomed) % 2]
            doomed.append(engine._requests[engine.add_request([1, 2, 3, 4, 5, 6], params)].group)
        for answers in doomed:
            if rng.random() < 0.1:
                engine.abort(answers.id)
                assert answers.completion().finish_reason in ("abort", "length")
        if rng.random() < 0.03:
            engine.rebuild()

    fakes.drain(engine, disturb)
    assert [each(answers.completion()) for answers in kept] == [each_ for _, each_ in undisturbed]
    assert_empty(engine)
