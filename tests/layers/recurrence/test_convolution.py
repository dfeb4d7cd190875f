"""Causal convolution against numpy's, and its tails."""

import chex
import jax
import numpy as np
import pytest

from layers.recurrence import convolution


def _inputs(Y, W, X=7, w=4):
    draw = np.random.default_rng(0).standard_normal
    arrays = draw((Y, W, X)), draw((X, w)), draw(X), draw((Y, w - 1, X))
    return tuple(array.astype(np.float32) for array in arrays)


@pytest.mark.parametrize(("W", "w"), [(1, 4), (2, 4), (11, 3), (5, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_equals_numpys(W, w, has_bias):
    x, taps, bias, tail = _inputs(2, W, w=w)
    out = np.asarray(jax.jit(convolution.causal)(x, taps, bias if has_bias else None, tail))
    inputs = np.concatenate([tail, x], axis=1).astype(np.float64)
    for y, channel in np.ndindex(2, 7):
        expected = np.convolve(inputs[y, :, channel], taps[channel, ::-1], mode="valid")
        expected = expected + bias[channel] * has_bias
        np.testing.assert_allclose(out[y, :, channel], expected, atol=1e-6)


def test_bits_depend_on_no_neighbour_and_no_split():
    x, taps, bias, tail = _inputs(5, 18, X=33)
    causal = jax.jit(convolution.causal)
    whole = np.asarray(causal(x, taps, bias, tail))
    for rows, size in ((1, 9), (1, 1), (3, 2)):
        before, parts = tail[:rows], []
        for start in range(0, 18, size):
            part = x[:rows, start : start + size]
            parts.append(causal(part, taps, bias, before))
            before = np.concatenate([before, part], axis=1)[:, -3:]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[:rows])


@pytest.mark.parametrize(("W", "w"), [(1, 4), (2, 4), (7, 3), (3, 1)])
def test_tails_are_the_newest_inputs(W, w):
    x, _, _, tail = _inputs(3, W, w=w)
    inputs = np.concatenate([tail, x], axis=1)
    found = np.asarray(jax.jit(convolution.tails)(x, tail))
    chex.assert_shape(found, (3, W, w - 1, 7))
    for t in range(W):
        np.testing.assert_array_equal(found[:, t], inputs[:, t + 1 : t + w])
    num_tokens = np.array([0, W, 1])
    after = np.asarray(jax.jit(convolution.tail_after)(x, tail, num_tokens))
    for y, n in enumerate(num_tokens):
        np.testing.assert_array_equal(after[y], inputs[y, n : n + w - 1])
