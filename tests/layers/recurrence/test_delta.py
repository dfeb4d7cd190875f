"""Gated delta rule against a loop in float64, and its two forms against each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.recurrence import delta
from tests.layers.recurrence import forms
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code

_recurrent = forms.compiled(delta.recurrent)
_chunked = forms.compiled(delta.chunked)


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


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.1, 20.0])
def test_both_forms_equal_a_loop_in_float64(W, by_channel, strength):
    inputs = _inputs(2, W, by_channel=by_channel, strength=strength)
    expected, states = _loop(*inputs)
    out, after = _recurrent(*inputs)
    close(out, expected)
    close(after, states)
    out, after = _chunked(*inputs, chunk=5)
    close(out, expected)
    close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@settings(max_examples=12, derandomize=True)
@given(st.data())
def test_forms_agree_wherever_a_row_is_split(data):
    by_channel = data.draw(st.booleans())
    *tokens, before = _inputs(2, 13, by_channel=by_channel, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(*tokens, before)
    out_1, middle = _chunked(*(x[:, :at] for x in tokens), before, chunk=chunk)
    out_2, after = _chunked(*(x[:, at:] for x in tokens), middle[:, -1], chunk=chunk)
    close(np.concatenate([out_1, out_2], axis=1), whole)
    close(after[:, -1], states[:, -1])


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_whole_chunk_of_strong_and_weak_decays(by_channel):
    """Some forget all at every token, others hardly anything, and one head changes its mind."""
    q, k, v, log_decay, beta, before = _inputs(1, 64, by_channel=by_channel)
    log_decay[..., ::2] = -20.0
    log_decay[:, :60, 1] = -700.0 / 60
    inputs = q, k, v, log_decay, beta, before
    expected, states = _loop(*inputs)
    out, after = _chunked(*inputs, chunk=64)
    close(out, expected, 2e-6)
    close(after[:, -1], states[:, -1], 2e-6)


@pytest.mark.parametrize("by_channel", [False, True])
def test_bits_depend_on_no_neighbour_and_no_split(by_channel):
    *tokens, before = _inputs(5, 18, N=2, M=16, H=33, by_channel=by_channel)
    forms.bits_are_its_own(delta.recurrent, tokens, before)


def test_chunks_resume_where_they_are_told_to():
    *tokens, before = _inputs(3, 8)
    forms.chunks_resume(_chunked, tokens, before)


def test_padding_leaves_the_state():
    q, k, v, log_decay, beta, before = _inputs(2, 11)
    k[:, 5:], log_decay[:, 5:], beta[:, 5:] = 0, 0, 0
    inputs = q, k, v, log_decay, beta, before
    _, states = _recurrent(*inputs)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = _chunked(*inputs, chunk=4)
    close(after[:, 1:], states[:, 4:6])


@pytest.mark.parametrize("by_channel", [False, True])
def test_gradients_of_both_forms_agree(by_channel):
    strengths = (0.0, 1.0, 20.0)
    cases = [_inputs(1, 13, by_channel=by_channel, strength=strength) for strength in strengths]
    forms.gradients_agree(delta.recurrent, delta.chunked, *cases)
