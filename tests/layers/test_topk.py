"""Largest entries of rows of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import topk
from tests import compiling

pytestmark = pytest.mark.quick_code

best = compiling.jit(lambda x_QV: topk.summarize(x_QV).best_Q)


def peaked(rng, rows, vocab):
    """Logits as a model makes them: a few tokens stand out."""
    return (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 40, 128, 131, 300, 49_152])
def test_argmax_equals_numpys(vocab):
    rng = np.random.default_rng(vocab)
    x = np.concatenate([
        peaked(rng, 2, vocab), rng.integers(0, 3, size=(4, vocab)).astype(np.float32),
        np.full((1, vocab), -np.inf, np.float32),
    ])  # fmt: skip
    ids = best(x)
    np.testing.assert_array_equal(ids, jnp.argmax(x, axis=-1))
    for nan in (np.nan, -np.nan):
        x[:, vocab // 2 :], x[0] = nan, nan
        ids = np.asarray(best(x))
        assert (ids >= 0).all() and (ids < vocab).all()


@pytest.mark.parametrize("vocab,n", [(40, 40), (131, 5), (300, 72), (49_152, 64)])
def test_top_n_equals_top_k_with_ties(vocab, n):
    rng = np.random.default_rng(n)
    x = np.concatenate([peaked(rng, 2, vocab), rng.integers(0, 9, size=(3, vocab))]).astype("f4")
    values, ids = compiling.call(topk.top_n, x, topk.summarize(x).maxima_QG, n=n)
    expected_values, expected_ids = jax.lax.top_k(jnp.asarray(x), n)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(ids, expected_ids)
