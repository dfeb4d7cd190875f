"""The sampler of accelerators against that of CPUs, and what it must not contain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.request import FIELDS, SamplingParams
from inference.sampling import parameters, sampler
from inference.scheduling.sequence import Sequence
from layers import topk
from tests import accelerators, compiling
from tests.inference.sampling.test_sampling import ROWS, Request, fill, peaked, tile

pytestmark = pytest.mark.quick_code
_CONTROL_FLOW = {"cond", "while", "scan"}


def _sample(logits_QV, *others):
    return sampler.sample(logits_QV, topk.summarize(logits_QV), *others)


sample = compiling.jit(_sample)
sample_there = compiling.jit(accelerators.written_for("cuda", _sample))

_FILTERS = [
    Request(), Request(0.0), Request(0.7), Request(3.0), Request(20.0, 0, 0.9),
    *[Request(top_k=k) for k in (1, 2, 64, 72, 73, 130, 10**9)],
    *[Request(top_p=p) for p in (1e-6, 0.3, 0.9, 0.999)],
    *[Request(min_p=p) for p in (1e-9, 0.05, 1.0)],
    *[Request(epsilon_cutoff=p) for p in (0.003, 0.05)], Request(3.0, 99, 0.9, 0.01, 0.02),
    Request(3.0, 50, 0.95), Request(3.0, 100, 0.95, 0.01), Request(2.0, 100, 0.05),
    Request(0.8, 0, 0.8, bias=((3, 2.0),), banned_token_ids=(7,)),
    Request(
        0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25, bias=((5, 9.0),),
    ),
    Request(1.5, allowed_token_ids=tuple(range(0, 40, 3)), min_tokens=9, stop_token_ids=(3, 6)),
    Request(1.0, grammar_ids=(1, 2, 39), repetition_penalty=0.6, top_k=9),
]  # fmt: skip


def test_both_draw_the_same():
    vocab = 300
    rng = np.random.default_rng(vocab)
    rows = len(_FILTERS)
    counts = rng.poisson(0.3, size=(rows, 2, vocab)).astype(np.uint16)
    for position in range(12, 24):
        arguments = fill(peaked(rng, rows, vocab, 2.0), _FILTERS, counts, position)
        np.testing.assert_array_equal(sample_there(*arguments), sample(*arguments))


def test_both_draw_the_same_from_a_real_vocabulary():
    requests = [
        Request(0.8, 50, 0.95), Request(1.0, 64, 0.95), Request(0.8, 0, 0.9), Request(3.0, 0, 0.95),
        Request(1.0, 2000), Request(1.0, 1000, 0.5, 0.001), Request(1.0, 0, 1.0, 0.1), Request(),
    ]  # fmt: skip
    arguments = fill(peaked(np.random.default_rng(0), len(requests), 49_152), requests)
    np.testing.assert_array_equal(sample_there(*arguments), sample(*arguments))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_a_distribution_harm_no_other(bad):
    """A row of only -inf ends, or is no token's."""
    x = peaked(np.random.default_rng(1), 4, 131)
    broken = x.copy()
    broken[2], broken[1, 60] = bad, bad
    requests = [
        Request(),
        Request(),
        Request(top_k=9, top_p=0.9, stop_token_ids=(9,)),
        Request(0.0),
    ]
    ids, healthy = (np.asarray(sample_there(*fill(each, requests)))[:4] for each in (broken, x))
    np.testing.assert_array_equal(ids[[0, 3]], healthy[[0, 3]])
    assert (ids < 131).all() and (ids >= 0).all()
    if bad == -np.inf:
        assert ids[2] == 9


@pytest.mark.parametrize("platform", accelerators.KINDS)
def test_there_is_no_branch_and_no_loop(platform):
    arguments = fill(np.zeros((3, 300), np.float32), [Request()] * 3)
    found = functools.partial(accelerators.primitives, _sample, *arguments)
    assert not found(platform=platform) & (_CONTROL_FLOW | {"sort", "top_k"})


@pytest.mark.parametrize("mass", [1.0, 7.0, 299.0, 300.0])
def test_masses_find_the_key(mass):
    """Zeros of both signs, equals and infinities among them."""
    x = np.round(peaked(np.random.default_rng(3), 8, 300), 1)
    x[0], x[1, :150], x[1, 150:], x[2, 5:], x[3, :4] = 0.0, -0.0, 0.0, -np.inf, np.inf
    arguments = topk.ordered_key(x), jnp.ones(x.shape), jnp.full(8, mass)
    found = accelerators.written_for("cuda", topk.mass_key)(*arguments)
    np.testing.assert_array_equal(found, topk.mass_key(*arguments))
    np.testing.assert_array_equal(topk.value_of_key(found), np.sort(x)[:, -int(mass)])


def test_a_greedy_row_of_neutral_parameters_is_the_argmax():
    x = peaked(np.random.default_rng(1), 5, 131)
    state = parameters.init(5, 131)
    np.testing.assert_array_equal(sample_there(x, state, np.zeros(5, np.int32)), x.argmax(-1))


@pytest.mark.parametrize("draw", [sample, sample_there])
def test_a_greedy_request_draws_the_argmax(draw):
    """Steps of greedy requests leave the sampler out. Here each field stands at its bounds, where
    one that can change a greedy token does: the best token occurs often, and ends the text.
    """
    x = peaked(np.random.default_rng(2), 1, 300, 1.0)
    best, requests = int(x.argmax()), []
    for name, field in FIELDS.items():
        if field.dtype:
            low = 1e-6 if field.kind.is_open else field.kind.low
            requests += [
                (name, SamplingParams(**{name: bound})) for bound in (low, field.kind.high)
            ]
    rows = [
        parameters.request_row(Sequence(0, params, [1, 2], 2, frozenset({best}), seed=7), 300)
        for _, params in [*requests, *[("", SamplingParams())] * (ROWS - len(requests))]
    ]
    counts = np.zeros((ROWS, 2, 300), np.uint16)
    counts[:, :, best] = 3
    arguments = fill(tile(x, ROWS), [Request()] * ROWS, counts)
    stacked = jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *rows)
    ids = np.asarray(draw(arguments[0], stacked, *arguments[2:]))
    changed = {request for request, token in zip(requests, ids, strict=False) if token != best}
    assert not [name for name, params in changed if params.is_greedy]
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert {name for name, _ in changed} >= penalties | {"temperature", "min_tokens"}
