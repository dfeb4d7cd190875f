"""Greedy steps of their own, and steps as accelerators get them: the same tokens."""

import functools

import numpy as np
import pytest

from inference.runtime import step
from inference.scheduling import scheduler
from tests import accelerators, fakes

pytestmark = pytest.mark.quick_code

_REQUESTS = [
    fakes.greedy(6), fakes.greedy(9),
    fakes.greedy(5, temperature=0.8, top_p=0.9, seed=1), fakes.greedy(4, temperature=2.0, seed=2),
    fakes.greedy(6, repetition_penalty=1.5), fakes.greedy(6, logit_bias=((7, 4.0), (9, -4.0))),
]  # fmt: skip
_PROMPTS = fakes.prompts([5, 20, 9, 17, 3, 12])
_SETTINGS = {
    "max_seqs": 4, "decode_rows": (4,), "prefill_chunks": (2,), "chunk_tokens": 16,
    "max_context": 128, "penalties": True, "top_logprobs": 2, "attention": "reference",
    "linear": "reference",
}  # fmt: skip


def _engine(**more):
    """Whose steps all have rows of both kinds: one to compile, and with greedy steps two."""
    engine = fakes.engine(fakes.llama(), **_SETTINGS | more)
    shapes = [each for each in engine.scheduler.shapes if each.prefill[0] and not each.scored]
    engine.scheduler.shapes = tuple(shapes)
    return engine


def _answers(engine, prompts, requests):
    """Token ids, log-probabilities and alternatives, all requests side by side, then each alone."""
    found = engine.generate(prompts, requests)
    for prompt, params in zip(prompts, requests, strict=True):
        found += engine.generate([prompt], params)
    return [(answer.token_ids, answer.logprobs, answer.top_logprobs) for answer in found]


@functools.cache
def _expected():
    engine = _engine()
    return _answers(engine, _PROMPTS, _REQUESTS)


def _check(answers):
    for (ids, logprobs, tops), (own_ids, own, own_tops) in zip(answers, _expected(), strict=True):
        assert ids == own_ids
        np.testing.assert_allclose(logprobs, own, atol=2e-5)
        for (top_ids, values), (own_top_ids, own_values) in zip(tops, own_tops, strict=True):
            assert top_ids == own_top_ids
            np.testing.assert_allclose(values, own_values, atol=2e-5)


def test_the_host_decides_which_steps_are_greedy(monkeypatch):
    """A step is where every row that emits a token is; other rows have no say."""
    used, choose, _ = [], scheduler.shape_of, _expected()

    def shape_of(builders, shapes, rows):
        found, [builder] = choose(builders, shapes, rows), builders
        emitting = [c.sequence.params for c in (*builder.decode, *builder.prefill) if c.emits]
        used.append((found.greedy, all(params.is_greedy for params in emitting)))
        return found

    monkeypatch.setattr(scheduler, "shape_of", shape_of)
    engine = _engine(greedy_steps=True)
    assert any(shape.greedy for shape in engine.scheduler.shapes)
    _check(_answers(engine, _PROMPTS, _REQUESTS))
    assert set(used) == {(True, True), (False, False)}


@pytest.mark.parametrize("platform", accelerators.KINDS)
def test_a_step_as_accelerators_get_it(platform, monkeypatch):
    fakes.forget_programs()
    monkeypatch.setattr(step, "step", accelerators.written_for(platform, step.step))
    engine = _engine(greedy_steps=True)
    _check(_answers(engine, _PROMPTS, _REQUESTS))
    fakes.forget_programs()
