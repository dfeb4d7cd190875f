"""Selective scan against a loop in float64, and its two forms against each other."""

import functools

import jax
import jax.numpy as jnp
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
_chunked_elsewhere = forms.elsewhere(diagonal)
_elsewhere = forms.compiled(_chunked_elsewhere)
_on_both = pytest.mark.parametrize("chunked", [_chunked, _elsewhere], ids=["cpu", "elsewhere"])


def _inputs(Y, W, X=7, M=5, strength=1.0, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    x, dt, A = draw((Y, W, X)), np.abs(draw((Y, W, X))), -np.abs(draw((M, X))) * strength
    B, C, before = draw((Y, W, M)), draw((Y, W, M)), draw((Y, M, X))
    return tuple(array.astype(np.float32) for array in (x, dt, A, B, C, before))


def _loop(*inputs):
    """Token by token, in float64."""
    x, dt, A, B, C, state = (array.astype(np.float64) for array in inputs)
    out, states = np.zeros(x.shape), np.zeros((*x.shape[:2], *A.shape))
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t, None] * A)
        state = decay * state + (dt[:, t] * x[:, t])[:, None] * B[:, t, :, None]
        out[:, t], states[:, t] = np.einsum("ymx,ym->yx", state, C[:, t]), state
    return out, states


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("strength", [0.1, 20.0])
@_on_both
def test_both_forms_equal_a_loop_in_float64(chunked, W, strength):
    inputs = _inputs(2, W, strength=strength)
    expected, states = _loop(*inputs)
    out, after = _recurrent(*inputs)
    close(out, expected)
    close(after, states)
    out, after = chunked(*inputs, chunk=5)
    close(out, expected)
    close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@settings(max_examples=8, derandomize=True)
@given(st.data())
@_on_both
def test_forms_agree_wherever_a_row_is_split(chunked, data):
    x, dt, A, B, C, before = _inputs(2, 13, seed=data.draw(st.integers(0, 99)))
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(x, dt, A, B, C, before)
    first, second = ([y[:, part] for y in (x, dt, B, C)] for part in np.s_[:at, at:])
    out_1, middle = chunked(*first[:2], A, *first[2:], before, chunk=chunk)
    out_2, after = chunked(*second[:2], A, *second[2:], middle[:, -1], chunk=chunk)
    close(np.concatenate([out_1, out_2], axis=1), whole)
    close(after[:, -1], states[:, -1])


def test_bits_depend_on_no_neighbour_and_no_split():
    x, dt, A, B, C, before = _inputs(5, 18, X=33, M=16)

    def recurrent(x, dt, B, C, before):
        return diagonal.recurrent(x, dt, A, B, C, before)

    forms.bits_are_its_own(recurrent, (x, dt, B, C), before)


def test_chunks_have_the_bits_of_single_tokens_on_a_cpu():
    inputs = _inputs(2, 40, X=33, M=16)
    out, states = jax.jit(diagonal.recurrent)(*inputs)
    found, after = jax.jit(functools.partial(diagonal.chunked, chunk=10))(*inputs)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(after, states[:, 9::10])


@_on_both
def test_chunks_resume_where_they_are_told_to(chunked):
    x, dt, A, B, C, before = _inputs(3, 8)

    def fed(x, dt, B, C, before, **more):
        return chunked(x, dt, A, B, C, before, **more)

    forms.chunks_resume(fed, (x, dt, B, C), before)


@_on_both
def test_padding_leaves_the_state(chunked):
    inputs = _inputs(2, 11)
    inputs[1][:, 5:] = 0
    _, states = _recurrent(*inputs)
    np.testing.assert_array_equal(states[:, 5:], np.repeat(states[:, 4:5], 6, axis=1))
    _, after = chunked(*inputs, chunk=4)
    close(after[:, 1:], states[:, 4:6])


@pytest.mark.parametrize("chunked", [diagonal.chunked, _chunked_elsewhere])
def test_gradients_of_both_forms_agree(chunked):
    cases = [_inputs(1, 13, strength=strength) for strength in (1.0, 20.0)]
    forms.gradients_agree(diagonal.recurrent, chunked, *cases)


@pytest.mark.parametrize("chunked", [diagonal.chunked, _chunked_elsewhere])
def test_gradients_keep_the_states_of_few_tokens(chunked):
    inputs = _inputs(1, 2048, X=16, M=16)
    gradients = jax.grad(lambda inputs: jnp.sum(chunked(*inputs, chunk=16)[0] ** 2))
    memory = jax.jit(gradients).lower(inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2048 * 16 * 16  # those of every token, once
