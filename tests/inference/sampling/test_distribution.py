"""The distribution that rejection weighs drafts by: transformers' processors in numpy, and no other
token than the sampler draws.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from inference.sampling import sampler
from tests import accelerators, compiling
from tests.inference.sampling.test_sampling import (
    ROWS,
    Request,
    draw_filled,
    fill,
    peaked,
    reference_edit,
    reference_warp,
    softmax,
)

pytestmark = pytest.mark.quick_code

distribution = compiling.jit(sampler.distribution)
distribution_there = compiling.jit(accelerators.written_for("cuda", sampler.distribution))

ASKED = [
    Request(), Request(0.7), Request(20.0, 0, 0.9), Request(3.0, 50, 0.95),
    *[Request(top_k=k) for k in (1, 2, 72, 73, 299)], *[Request(top_p=p) for p in (0.3, 0.999)],
    Request(min_p=0.05), Request(epsilon_cutoff=0.01), Request(2.0, 100, 0.9, 0.01, 0.02),
    Request(0.8, bias=((3, 2.0),)),
    Request(
        0.8, 0, 0.9, banned_token_ids=(7,), repetition_penalty=1.7, presence_penalty=0.5,
        frequency_penalty=0.25,
    ),
    Request(1.5, allowed_token_ids=tuple(range(0, 40, 3)), min_tokens=9, stop_token_ids=(3, 6)),
    Request(1.0, grammar_ids=(1, 2, 39), repetition_penalty=0.6, top_k=9),
]  # fmt: skip


@pytest.mark.parametrize(
    "program, vocab", [(distribution, 300), (distribution, 8), (distribution_there, 300)]
)
def test_it_is_that_of_the_filters_in_their_order(program, vocab):
    rng = np.random.default_rng(vocab)
    requests = [
        r for r in ASKED if vocab == 300 or not (r.bias or r.grammar_ids or r.allowed_token_ids)
    ]
    x, counts = (
        peaked(rng, len(requests), vocab, 2.0),
        rng.poisson(0.3, size=(len(requests), 2, vocab)),
    )
    found = np.asarray(program(*fill(x, requests, counts.astype(np.uint16))))[: len(requests)]
    expected = [
        softmax(reference_warp(reference_edit(x[q], requests[q], 12, counts[q]), requests[q]))
        for q in range(len(requests))
    ]
    assert len(requests) > 9
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)
    np.testing.assert_array_equal(found == 0, np.array(expected) == 0)


@pytest.mark.parametrize("is_there", [False, True])
def test_the_likeliest_drafts_are_its_own(is_there):
    """None that the request's filters leave out, and as sure as the distribution says."""
    best = functools.partial(sampler.best, n=5, is_drawn=False)
    program = compiling.jit(accelerators.written_for("cuda", best) if is_there else best)
    requests = [r for r in ASKED if not (r.bias or r.grammar_ids or r.allowed_token_ids)]
    arguments = fill(peaked(np.random.default_rng(4), len(requests), 8, 2.0), requests)
    ids, sure = (np.asarray(x)[: len(requests)] for x in program(*arguments[:4]))
    prob_QV = np.asarray(distribution(*arguments))[: len(requests)]
    expected = -np.sort(-prob_QV, axis=1)[:, :5]
    np.testing.assert_array_equal(ids >= 0, expected > 0)
    np.testing.assert_allclose(np.exp(sure), expected, rtol=1e-4)
    found = np.take_along_axis(prob_QV, np.maximum(ids, 0), axis=1)
    np.testing.assert_array_equal(np.where(ids >= 0, found, 0), expected)
    assert (expected == 0).any()


def test_greedy_rows_have_one_token():
    x = peaked(np.random.default_rng(1), 3, 300)
    asked = [Request(0.0), Request(0.0, 9, 0.5, 0.1), Request(0.0, bias=((5, 99.0),))]
    for program in (distribution, distribution_there):
        found = np.asarray(program(*fill(x, asked)))[:3]
        np.testing.assert_array_equal(found.argmax(-1), draw_filled(x, asked))
        assert ((found == 1).sum(-1) == 1).all() and ((found == 0).sum(-1) == 299).all()


def test_rows_without_any_token_end():
    x = np.zeros((3, 300), np.float32)
    none = Request(allowed_token_ids=(4,), grammar_ids=(5,))
    requests = [Request(), dataclasses.replace(none, stop_token_ids=(9, 3)), none]
    for program in (distribution, distribution_there):
        found = np.asarray(program(*fill(x, requests)))[:3]
        np.testing.assert_array_equal(found[1:].argmax(-1), [9, 0])
        assert np.isfinite(found).all() and (found[1:].max(-1) == 1).all()


@pytest.mark.quick_code(False)
def test_a_row_depends_on_itself_only():
    x = peaked(np.random.default_rng(2), len(ASKED), 300)
    arguments = fill(x, ASKED)
    order = np.random.default_rng(3).permutation(ROWS)
    together = np.asarray(distribution(*arguments))
    permuted = np.asarray(distribution(*jax.tree.map(lambda leaf: leaf[order], arguments)))
    np.testing.assert_array_equal(permuted[np.argsort(order)], together)
