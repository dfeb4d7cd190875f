"""Acceptance by rejection through the whole engine: answers follow the model's own distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.heads import BRANCHING, Eagle, Medusa
from configs.model import ModelConfig
from configs.settings.drafts import PROPOSERS
from inference.request import SamplingParams
from inference.sampling import parameters, sampler
from inference.scheduling.sequence import Sequence
from layers import decoder, ragged
from tests import compiling, fakes
from tests.inference.speculation.tiny_pairs import p_value

VOCAB, LENGTH = 8, 3
TARGET, DRAFT = fakes.llama(vocab_size=VOCAB), fakes.quirks(vocab_size=VOCAB)
PROMPT = [0, 1, 1, 2, 1, 1, 3, 1, 1, 4, 1, 1, 5, 1, 1, 6, 1, 1, 7, 1, 1, 0, 2]
ASKED = SamplingParams(  # what follows n-grams is likely, and not certain
    max_new_tokens=LENGTH, temperature=2.0, top_p=0.97, logit_bias=((1, 1.0),), ignore_eos=True
)
SIZES = dict(
    max_seqs=64, decode_rows=(64,), page_tokens=8, chunk_tokens=16, prefill_chunks=(8,), seed=1,
    num_drafts=2, acceptance="rejection",
)  # fmt: skip
DISTURBANCES = {
    "undisturbed": {"prefix_cache": False},
    "preempted": {"prefix_cache": False, "preemption": "recompute"},
    "prefix hit": {},
    "chunked": {"prefix_cache": False, "prefill_budget": 16},
}
LEAST = 1e-5  # a p-value
MANY = 20_000  # answers, of long cases


@functools.cache
def cells():
    """The law of all answers, [8 x 8 x 8], computed without an engine."""
    texts = np.array([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)], np.int32)
    every = ragged.contiguous(*texts.shape)
    rows = len(texts) * LENGTH
    own = parameters.request_row(Sequence(1, ASKED, PROMPT, len(PROMPT)), VOCAB)
    sampling = jax.tree.map(lambda value: np.repeat(value[None], rows, axis=0), own)
    position_Q = jnp.full(rows, len(PROMPT), jnp.int32)

    def law(params, tokens_T):
        hidden_TD, _ = decoder.forward(params, TARGET, tokens_T, every)
        logits_QV = decoder.logits(params, TARGET, hidden_TD).reshape(*texts.shape, VOCAB)
        last_QV = logits_QV[:, -LENGTH:].reshape(rows, VOCAB)
        return sampler.distribution(last_QV, sampling, position_Q)

    law_QV = compiling.call(law, fakes.real_params(TARGET), texts.ravel())
    law = np.asarray(law_QV, np.float64).reshape(VOCAB, VOCAB, LENGTH, VOCAB)
    return law[0, 0, 0][:, None, None] * law[:, 0, 1][:, :, None] * law[:, :, 2]


OWN = {field.name: getattr(TARGET, field.name) for field in dataclasses.fields(ModelConfig)}
DRAFTS = {
    "draft": DRAFT,
    "medusa": Medusa(**OWN | {"num_layers": 0, "pattern": ()}, num_heads=2),
    "eagle": Eagle(**OWN | {"num_layers": 1}),
}
TREES = {  # that heads draft
    "medusa": {"draft_tree": (0, 0, 0, 1, 1, 2), "num_drafts": 6},
    "eagle": {"tree_levels": 2, "tree_branches": 3, "num_drafts": 6},
}


def counted(proposer, name, samples):
    """How often the engine began an answer so; with trees it is longer, to have room for them."""
    params, asked = dict(fakes.real_params(TARGET)), ASKED
    more = {"proposer": proposer} | DISTURBANCES[name]
    if proposer in DRAFTS:
        more["draft"] = DRAFTS[proposer]
        params["draft"] = fakes.real_params(DRAFTS[proposer])
    if proposer in BRANCHING:
        more |= TREES[proposer]
        asked = dataclasses.replace(ASKED, max_new_tokens=LENGTH + 6)
    shapes = "riding" if samples >= MANY else "one"
    engine = fakes.engine(TARGET, params, shapes, **(SIZES | more))
    found, rng = np.zeros(VOCAB**LENGTH, int), np.random.default_rng(0)
    for _ in range(0, samples, 256):
        ids = [engine.add_request(PROMPT, asked) for _ in range(256)]
        sequences = [fakes.sequence_of(engine, id) for id in ids]
        while engine.scheduler.has_work:
            running = engine.scheduler.running
            if name == "preempted" and running and rng.random() < 0.3:
                engine.scheduler.preempt(running[rng.integers(len(running))])
            engine.step()
        for sequence in sequences:
            a, b, c = sequence.output_tokens[:LENGTH]
            found[(a * VOCAB + b) * VOCAB + c] += 1
    counters = engine.scheduler.counters
    assert 0.05 * counters.num_drafts < counters.num_accepted < 0.95 * counters.num_drafts
    if proposer in BRANCHING:
        assert max(accepted for _, accepted in counters.verified) == 2  # levels
    if name == "preempted":
        assert counters.num_preemptions > samples / 256 / 4
    if name == "prefix hit":
        assert counters.num_cached_tokens > counters.num_prompt_tokens / 2
    return found


@pytest.mark.parametrize("samples, proposer, name", [
    pytest.param(1024, "ngram", "prefix hit", marks=pytest.mark.quick_code),
    *(pytest.param(MANY, proposer, name, marks=[pytest.mark.long, pytest.mark.timeout(900)])
      for proposer in PROPOSERS for name in DISTURBANCES),
])  # fmt: skip
def test_answers_follow_the_law(samples, proposer, name):
    law = cells().ravel()
    assert law.sum() == pytest.approx(1, abs=1e-5) and law.max() < 0.5
    assert p_value(counted(proposer, name, samples), law) > LEAST


@pytest.mark.long
def test_a_total_variation_of_a_twentieth_is_found():
    """In each of 100 engines' worth of answers, were they drawn from another law."""
    law, rng = cells().ravel(), np.random.default_rng(1)
    found = 0
    for _ in range(100):
        order = rng.permutation(len(law))
        other = law.copy()
        gain, loss = (half[np.cumsum(law[half]) > 0] for half in np.array_split(order, 2))
        other[gain] *= 1 + 0.05 / law[gain].sum()
        other[loss] *= 1 - 0.05 / law[loss].sum()
        assert np.abs(other - law).sum() / 2 == pytest.approx(0.05)
        found += p_value(rng.multinomial(20_000, other / other.sum()), law) < LEAST
    assert found >= 99


@pytest.mark.parametrize("settings, expected", [
    ({"deterministic": True}, "acceptance=rejection: goes without engine.deterministic"),
    ({"proposer": None}, "acceptance=rejection: needs engine.drafts.proposer"),
    ({"acceptance": "x"}, "acceptance=x: must be one of coupled, rejection, typical"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(settings, expected):
    with pytest.raises(InputError, match=expected):
        fakes.engine(TARGET, **(SIZES | {"proposer": "ngram"} | settings))


def test_a_seed_asks_for_plain_tokens():
    """The request's own: those of its further answers follow from one that was drawn."""
    engine = fakes.engine(TARGET, **(SIZES | {"proposer": "ngram"}))
    engine.add_request(PROMPT, dataclasses.replace(ASKED, n=3))
    with pytest.raises(InputError, match="a seed asks for plain decoding's tokens"):
        engine.add_request(PROMPT, SamplingParams(seed=3))
