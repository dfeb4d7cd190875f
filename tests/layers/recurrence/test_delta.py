"""Gated delta rule against a loop in float64, and its two forms against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.recurrence import delta
from tests import compiling

pytestmark = pytest.mark.quick_code

_recurrent = compiling.jit(delta.recurrent)
_chunked = compiling.jit(delta.chunked, static_argnames="chunk")


def _inputs(Y, W, N=3, M=5, H=7, by_channel=True, strength=1.0, seed=0):
    """Keys of length 1 and rates up to 1, as models have them: the rule is a contraction."""
    draw = np.random.default_rng(seed).standard_normal
    q, k, v = draw((Y, W, N, M)), draw((Y, W, N, M)), draw((Y, W, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.abs(draw((Y, W, N, M) if by_channel else (Y, W, N))) * strength
    beta = 1 / (1 + np.exp(-draw((Y, W, N))))
    before = draw((Y, N, M, H))
    return tuple(x.astype(np.float32) for x in (q, k, v, log_decay, beta, before))


def _loop(*inputs):
    """Token by token, head by head, in float64."""
    q, k, v, log_decay, beta, before = (x.astype(np.float64) for x in inputs)
    if log_decay.ndim == 3:
        log_decay = np.repeat(log_decay[..., None], k.shape[-1], axis=-1)
    out, states = np.zeros(v.shape), np.zeros((*v.shape[:2], *before.shape[1:]))
    for y, n in np.ndindex(v.shape[0], v.shape[2]):
        state = before[y, n]
        for t in range(v.shape[1]):
            at = y, t, n
            state = np.exp(log_decay[at])[:, None] * state
            state = state + np.outer(k[at], beta[at] * (v[at] - state.T @ k[at]))
            out[at], states[at] = state.T @ q[at], state
    return out, states


def _close(found, expected, tolerance=1e-5):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.1, 20.0])
def test_both_forms_equal_a_loop_in_float64(W, by_channel, strength):
    inputs = _inputs(2, W, by_channel=by_channel, strength=strength)
    expected, states = _loop(*inputs)
    out, after = _recurrent(*inputs)
    _close(out, expected)
    _close(after, states)
    out, after = _chunked(*inputs, chunk=5)
    _close(out, expected)
    _close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@settings(max_examples=12, derandomize=True)
@given(st.data())
def test_forms_agree_wherever_a_row_is_split(data):
    by_channel = data.draw(st.booleans())
    *tokens, before = _inputs(2, 13, by_channel=by_channel, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(*tokens, before)
    out_1, middle = _chunked(*(x[:, :at] for x in tokens), before, chunk=chunk)
    out_2, after = _chunked(*(x[:, at:] for x in tokens), middle[:, -1], chunk=chunk)
    _close(jnp.concatenate([out_1, out_2], axis=1), whole)
    _close(after[:, -1], states[:, -1])


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_whole_chunk_of_strong_and_weak_decays(by_channel):
    """Some forget all at every token, others hardly anything, and one head changes its mind."""
    q, k, v, log_decay, beta, before = _inputs(1, 64, by_channel=by_channel)
    log_decay[..., ::2] = -20.0
    log_decay[:, :60, 1] = -700.0 / 60
    inputs = q, k, v, log_decay, beta, before
    expected, states = _loop(*inputs)
    out, after = _chunked(*inputs, chunk=64)
    _close(out, expected, 2e-6)
    _close(after[:, -1], states[:, -1], 2e-6)


@pytest.mark.parametrize("by_channel", [False, True])
def test_bits_depend_on_no_neighbour_and_no_split(by_channel):
    inputs = _inputs(5, 18, N=2, M=16, H=33, by_channel=by_channel)
    recurrent = jax.jit(delta.recurrent)
    expected = [np.asarray(x) for x in recurrent(*inputs)]
    for rows, size in ((1, 18), (1, 1), (3, 2), (2, 9)):
        *tokens, state = (x[:rows] for x in inputs)
        parts = []
        for start in range(0, 18, size):
            parts.append(recurrent(*(x[:, start : start + size] for x in tokens), state))
            state = parts[-1][1][:, -1]
        for found, whole in zip(zip(*parts, strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(found, axis=1), whole[:rows])


def test_chunks_resume_where_they_are_told_to():
    *tokens, before = _inputs(3, 8)
    alone, states = _chunked(*tokens, before, chunk=4)
    is_new = np.array([False, False, True, False, True, False])
    resumed = np.zeros((6, *before.shape[1:]), np.float32)
    resumed[2], resumed[4] = before[1], before[2]
    in_a_row = (x.reshape(1, -1, *x.shape[2:]) for x in tokens)
    out, after = _chunked(*in_a_row, before[:1], (is_new, resumed), chunk=4)
    _close(out.reshape(alone.shape), alone)
    _close(after.reshape(states.shape), states)


def test_padding_leaves_the_state():
    q, k, v, log_decay, beta, before = _inputs(2, 11)
    k[:, 5:], log_decay[:, 5:], beta[:, 5:] = 0, 0, 0
    inputs = q, k, v, log_decay, beta, before
    _, states = _recurrent(*inputs)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = _chunked(*inputs, chunk=4)
    _close(after[:, 1:], states[:, 4:6])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [0.0, 1.0, 20.0])
def test_gradients_of_both_forms_agree(by_channel, strength):
    inputs = _inputs(1, 13, by_channel=by_channel, strength=strength)
    weights = np.random.default_rng(1).standard_normal(inputs[2].shape).astype(np.float32)

    def loss(form, *inputs):
        out, states = form(*inputs)
        return jnp.sum(out * weights) + jnp.sum(states[:, -1] ** 2)

    def chunked(*inputs):
        return delta.chunked(*inputs, chunk=5)

    forms = (delta.recurrent, chunked)
    found = [compiling.call(jax.grad(lambda x, f=f: loss(f, *x)), inputs) for f in forms]
    for expected, other in zip(*found, strict=True):
        _close(other, expected, 1e-4)
