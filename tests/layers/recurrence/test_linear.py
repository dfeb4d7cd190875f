"""Linear recurrence against a loop in float64, and its two forms against each other."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import InputError
from layers.recurrence import linear
from tests.layers.recurrence import forms
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code

_recurrent = forms.compiled(linear.recurrent)
_chunked = forms.compiled(linear.chunked)


def _inputs(Y, W, K=2, G=3, M=5, H=7, strength=1.0, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    q, k = draw((Y, W, K, M)), draw((Y, W, K, M))
    v, log_decay = draw((Y, W, K * G, H)), -np.abs(draw((Y, W, K * G))) * strength
    before = draw((Y, K * G, M, H))
    return tuple(x.astype(np.float32) for x in (q, k, v, log_decay, before))


def _loop(q, k, v, log_decay, before):
    """Token by token, head by head, in float64."""
    shared = v.shape[2] // k.shape[2]
    out, states = np.zeros(v.shape), np.zeros((*v.shape[:2], *before.shape[1:]))
    for y, n in np.ndindex(v.shape[0], v.shape[2]):
        state = before[y, n].astype(np.float64)
        for t in range(v.shape[1]):
            decay = 1.0 if log_decay is None else np.exp(np.float64(log_decay[y, t, n]))
            state = decay * state + np.outer(k[y, t, n // shared], v[y, t, n].astype(np.float64))
            out[y, t, n], states[y, t, n] = state.T @ q[y, t, n // shared], state
    return out, states


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("strength", [0.1, 20.0, None])
def test_both_forms_equal_a_loop_in_float64(W, G, strength):
    q, k, v, log_decay, before = _inputs(2, W, G=G, strength=strength or 1.0)
    inputs = q, k, v, None if strength is None else log_decay, before
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
    *tokens, before = _inputs(2, 13, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(*tokens, before)
    out_1, middle = _chunked(*(x[:, :at] for x in tokens), before, chunk=chunk)
    out_2, after = _chunked(*(x[:, at:] for x in tokens), middle[:, -1], chunk=chunk)
    close(np.concatenate([out_1, out_2], axis=1), whole)
    close(after[:, -1], states[:, -1])


def test_bits_depend_on_no_neighbour_and_no_split():
    *tokens, before = _inputs(5, 18, K=1, G=1, M=16, H=33)
    forms.bits_are_its_own(linear.recurrent, tokens, before)


def test_chunks_resume_where_they_are_told_to():
    *tokens, before = _inputs(3, 8)
    forms.chunks_resume(_chunked, tokens, before)


def test_padding_leaves_the_state():
    q, k, v, log_decay, before = _inputs(2, 11)
    k[:, 5:], log_decay[:, 5:] = 0, 0
    _, states = _recurrent(q, k, v, log_decay, before)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = _chunked(q, k, v, log_decay, before, chunk=4)
    close(after[:, 1:], states[:, 4:6])


def test_a_weak_decay_behind_strong_ones_keeps_its_digits():
    q, k, v, log_decay, before = _inputs(1, 64)
    log_decay[:] = np.where(np.arange(64) < 60, -700.0 / 60, -0.1)[:, None]
    expected, _ = _loop(q, k, v, log_decay, before)
    out, _ = _chunked(q, k, v, log_decay, before, chunk=64)
    close(out, expected, 2e-6)


def test_gradients_of_both_forms_agree():
    cases = [_inputs(1, 13, strength=strength) for strength in (0.0, 1.0, 20.0)]
    forms.gradients_agree(linear.recurrent, linear.chunked, *cases)


def test_heads_that_do_not_divide_are_refused():
    q, k, v, log_decay, before = _inputs(1, 3)
    inputs = q, k, v[:, :, :5], log_decay[:, :, :5], before[:, :5]
    for form in (linear.recurrent, linear.chunked):
        with pytest.raises(InputError, match="5 heads of values cannot share 2 of keys"):
            form(*inputs)


def test_several_rows_do_not_resume():
    inputs = _inputs(2, 3)
    with pytest.raises(InputError, match="single row"):
        jax.eval_shape(linear.chunked, *inputs, (np.array([True]), inputs[-1][:1]))
