"""Selective scan against a loop in float64, and its two forms against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.recurrence import diagonal
from tests import compiling

pytestmark = pytest.mark.quick_code

_recurrent = compiling.jit(diagonal.recurrent)
_chunked = compiling.jit(diagonal.chunked, static_argnames="chunk")


def _inputs(Y, W, X=7, M=5, strength=1.0, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    x, dt, A = draw((Y, W, X)), np.abs(draw((Y, W, X))), -np.abs(draw((X, M))) * strength
    B, C, before = draw((Y, W, M)), draw((Y, W, M)), draw((Y, X, M))
    return tuple(array.astype(np.float32) for array in (x, dt, A, B, C, before))


def _rows(inputs, rows=slice(None), tokens=slice(None)):
    """Some tokens of some rows, without a state."""
    x, dt, A, B, C, _ = inputs
    return x[rows, tokens], dt[rows, tokens], A, B[rows, tokens], C[rows, tokens]


def _loop(*inputs):
    """Token by token, in float64."""
    x, dt, A, B, C, state = (array.astype(np.float64) for array in inputs)
    out, states = np.zeros(x.shape), np.zeros((*x.shape, A.shape[1]))
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t, :, None] * A)
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out[:, t], states[:, t] = np.einsum("yxm,ym->yx", state, C[:, t]), state
    return out, states


def _close(found, expected, tolerance=1e-5):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("strength", [0.1, 20.0])
def test_both_forms_equal_a_loop_in_float64(W, strength):
    inputs = _inputs(2, W, strength=strength)
    expected, states = _loop(*inputs)
    out, after = _recurrent(*inputs)
    _close(out, expected)
    _close(after, states)
    out, after = _chunked(*inputs, chunk=5)
    _close(out, expected)
    _close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@settings(max_examples=8, derandomize=True)
@given(st.data())
def test_forms_agree_wherever_a_row_is_split(data):
    inputs = _inputs(2, 13, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(*inputs)
    first, second = _rows(inputs, tokens=slice(at)), _rows(inputs, tokens=slice(at, None))
    out_1, middle = _chunked(*first, inputs[-1], chunk=chunk)
    out_2, after = _chunked(*second, middle[:, -1], chunk=chunk)
    _close(jnp.concatenate([out_1, out_2], axis=1), whole)
    _close(after[:, -1], states[:, -1])


@pytest.mark.parametrize("X", [7, 64])
def test_bits_depend_on_no_neighbour_and_no_split(X):
    inputs = _inputs(5, 18, X=X, M=16)
    recurrent = jax.jit(diagonal.recurrent)
    expected = [np.asarray(x) for x in recurrent(*inputs)]
    for rows, size in ((1, 18), (1, 1), (3, 2), (2, 9)):
        state, parts = inputs[-1][:rows], []
        for start in range(0, 18, size):
            tokens = _rows(inputs, slice(rows), slice(start, start + size))
            parts.append(recurrent(*tokens, state))
            state = parts[-1][1][:, -1]
        for found, whole in zip(zip(*parts, strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(found, axis=1), whole[:rows])


def test_chunks_resume_where_they_are_told_to():
    inputs = _inputs(3, 8)
    before = inputs[-1]
    alone, states = _chunked(*inputs, chunk=4)
    is_new = np.array([False, False, True, False, True, False])
    resumed = np.zeros((6, *before.shape[1:]), np.float32)
    resumed[2], resumed[4] = before[1], before[2]
    tokens = (x.reshape(1, -1, x.shape[-1]) if x.ndim == 3 else x for x in _rows(inputs))
    out, after = _chunked(*tokens, before[:1], (is_new, resumed), chunk=4)
    _close(out.reshape(alone.shape), alone)
    _close(after.reshape(states.shape), states)


def test_padding_leaves_the_state():
    inputs = _inputs(2, 11)
    inputs[1][:, 5:] = 0
    _, states = _recurrent(*inputs)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = _chunked(*inputs, chunk=4)
    _close(after[:, 1:], states[:, 4:6])


@pytest.mark.parametrize("strength", [1.0, 20.0])
def test_gradients_of_both_forms_agree(strength):
    inputs = _inputs(1, 13, strength=strength)
    weights = np.random.default_rng(1).standard_normal(inputs[0].shape).astype(np.float32)

    def loss(form, *inputs):
        out, states = form(*inputs)
        return jnp.sum(out * weights) + jnp.sum(states[:, -1] ** 2)

    def chunked(*inputs):
        return diagonal.chunked(*inputs, chunk=5)

    forms = (diagonal.recurrent, chunked)
    found = [compiling.call(jax.grad(lambda x, f=f: loss(f, *x)), inputs) for f in forms]
    for expected, other in zip(*found, strict=True):
        _close(other, expected, 1e-4)
