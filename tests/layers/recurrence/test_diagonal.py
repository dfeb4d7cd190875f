"""Selective scan against a loop in float64, and its two forms against each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.recurrence import diagonal
from tests.layers.recurrence import forms
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code

_recurrent = forms.compiled(diagonal.recurrent)
_chunked = forms.compiled(diagonal.chunked)


def _inputs(Y, W, X=7, M=5, strength=1.0, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    x, dt, A = draw((Y, W, X)), np.abs(draw((Y, W, X))), -np.abs(draw((X, M))) * strength
    B, C, before = draw((Y, W, M)), draw((Y, W, M)), draw((Y, X, M))
    return tuple(array.astype(np.float32) for array in (x, dt, A, B, C, before))


def _loop(*inputs):
    """Token by token, in float64."""
    x, dt, A, B, C, state = (array.astype(np.float64) for array in inputs)
    out, states = np.zeros(x.shape), np.zeros((*x.shape, A.shape[1]))
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t, :, None] * A)
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out[:, t], states[:, t] = np.einsum("yxm,ym->yx", state, C[:, t]), state
    return out, states


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("strength", [0.1, 20.0])
def test_both_forms_equal_a_loop_in_float64(W, strength):
    inputs = _inputs(2, W, strength=strength)
    expected, states = _loop(*inputs)
    out, after = _recurrent(*inputs)
    close(out, expected)
    close(after, states)
    out, after = _chunked(*inputs, chunk=5)
    close(out, expected)
    close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@settings(max_examples=8, derandomize=True)
@given(st.data())
def test_forms_agree_wherever_a_row_is_split(data):
    x, dt, A, B, C, before = _inputs(2, 13, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(x, dt, A, B, C, before)
    first, second = ([y[:, part] for y in (x, dt, B, C)] for part in np.s_[:at, at:])
    out_1, middle = _chunked(*first[:2], A, *first[2:], before, chunk=chunk)
    out_2, after = _chunked(*second[:2], A, *second[2:], middle[:, -1], chunk=chunk)
    close(np.concatenate([out_1, out_2], axis=1), whole)
    close(after[:, -1], states[:, -1])


def test_bits_depend_on_no_neighbour_and_no_split():
    x, dt, A, B, C, before = _inputs(5, 18, X=33, M=16)

    def recurrent(x, dt, B, C, before):
        return diagonal.recurrent(x, dt, A, B, C, before)

    forms.bits_are_its_own(recurrent, (x, dt, B, C), before)


def test_chunks_resume_where_they_are_told_to():
    x, dt, A, B, C, before = _inputs(3, 8)

    def chunked(x, dt, B, C, before, **more):
        return _chunked(x, dt, A, B, C, before, **more)

    forms.chunks_resume(chunked, (x, dt, B, C), before)


def test_padding_leaves_the_state():
    inputs = _inputs(2, 11)
    inputs[1][:, 5:] = 0
    _, states = _recurrent(*inputs)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = _chunked(*inputs, chunk=4)
    close(after[:, 1:], states[:, 4:6])


def test_gradients_of_both_forms_agree():
    cases = [_inputs(1, 13, strength=strength) for strength in (1.0, 20.0)]
    forms.gradients_agree(diagonal.recurrent, diagonal.chunked, *cases)
