"""S4D against a loop in complex128, and its three forms against each other."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.recurrence import s4d
from tests import compiling
from tests.layers.recurrence import forms
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code


_recurrent = forms.compiled(s4d.recurrent)
_chunked = forms.compiled(s4d.chunked)
_chunked_elsewhere = forms.elsewhere(s4d)
_elsewhere = forms.compiled(_chunked_elsewhere)
_on_both = pytest.mark.parametrize("chunked", [_chunked, _elsewhere], ids=["cpu", "elsewhere"])


def _constants(X=7, M=5, decay=0.1):
    draw = np.random.default_rng(1).standard_normal
    log_a = -np.abs(draw((M, X))) * decay + 1j * draw((M, X))
    B, C = (draw((2, M, X)) + 1j * draw((2, M, X))).astype(np.complex64)
    return log_a.astype(np.complex64), B, C


def _inputs(Y, W, X=7, M=5, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return draw((Y, W, X)).astype(np.float32), draw((Y, 2, M, X)).astype(np.float32)


def _loop(x, log_a, B, C, before, is_valid):
    """Token by token, in complex128."""
    a, B, C = np.exp(log_a.astype(np.complex128)), B.astype(np.complex128), C
    state = before[:, 0].astype(np.complex128) + 1j * before[:, 1]
    out, states = np.zeros(x.shape), np.zeros((*x.shape[:2], *before.shape[1:]))
    for t in range(x.shape[1]):
        after = a * state + B * x[:, t, None]
        state = np.where(is_valid[:, t, None, None], after, state)
        out[:, t] = 2 * (C * state).real.sum(1)
        states[:, t] = np.stack([state.real, state.imag], axis=1)
    return out, states


@pytest.mark.parametrize("W", [3, 13])
@pytest.mark.parametrize("decay", [0.01, 20.0])
@_on_both
def test_both_forms_equal_a_loop_in_complex128(chunked, W, decay):
    (x, before), constants = _inputs(2, W), _constants(decay=decay)
    expected, states = _loop(x, *constants, before, np.ones((2, W), bool))
    out, after = _recurrent(x, *constants, before)
    close(out, expected)
    close(after, states)
    out, after = chunked(x, *constants, before, chunk=5)
    close(out, expected)
    close(after, states[:, [*range(4, W - 1, 5), W - 1]])


@pytest.mark.parametrize("W", [1, 13, 64])
def test_a_convolution_equals_a_loop_from_zero(W):
    (x, before), constants = _inputs(2, W), _constants(decay=0.01)
    expected, _ = _loop(x, *constants, 0 * before, np.ones((2, W), bool))
    close(compiling.call(s4d.convolved, x, *constants), expected)


@settings(max_examples=8, derandomize=True)
@given(st.data())
@_on_both
def test_forms_agree_wherever_a_row_is_split(chunked, data):
    (x, before), constants = _inputs(2, 13, seed=data.draw(st.integers(0, 99))), _constants()
    at, chunk = data.draw(st.sampled_from([1, 12])), data.draw(st.sampled_from([4, 64]))
    whole, states = _recurrent(x, *constants, before)
    out_1, middle = chunked(x[:, :at], *constants, before, chunk=chunk)
    out_2, after = chunked(x[:, at:], *constants, middle[:, -1], chunk=chunk)
    close(np.concatenate([out_1, out_2], axis=1), whole)
    close(after[:, -1], states[:, -1])


@_on_both
def test_padding_leaves_the_state(chunked):
    (x, before), constants = _inputs(3, 12), _constants()
    # Whole and partial chunks, and padding between two prompts of one row.
    is_valid = np.ones((3, 12), bool)
    is_valid[0, 5:], is_valid[1, 2:4], is_valid[1, 8:] = False, False, False
    expected, states = _loop(x, *constants, before, is_valid)
    for form, ends in ((_recurrent, slice(None)), (chunked, [3, 7, 11])):
        more = {"chunk": 4} if form is chunked else {}
        out, after = form(x, *constants, before, is_valid, **more)
        close(out[is_valid], expected[is_valid])
        close(after, states[:, ends])


def test_bits_depend_on_no_neighbour_and_no_split():
    (x, before), constants = _inputs(5, 18, X=33, M=16), _constants(X=33, M=16)

    def recurrent(x, before):
        return s4d.recurrent(x, *constants, before)

    forms.bits_are_its_own(recurrent, (x,), before)


def test_chunks_have_the_bits_of_single_tokens_on_a_cpu():
    (x, before), constants = _inputs(2, 40, X=33, M=16), _constants(X=33, M=16)
    out, states = jax.jit(s4d.recurrent)(x, *constants, before)
    found, after = jax.jit(functools.partial(s4d.chunked, chunk=10))(x, *constants, before)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(after, states[:, 9::10])


@_on_both
def test_chunks_resume_where_they_are_told_to(chunked):
    (x, before), constants = _inputs(3, 8), _constants()

    def fed(x, before, **more):
        return chunked(x, *constants, before, **more)

    forms.chunks_resume(fed, (x,), before)


@pytest.mark.parametrize("chunked", [s4d.chunked, _chunked_elsewhere])
def test_gradients_of_both_forms_agree(chunked):
    x, before = _inputs(1, 13)

    def of_reals(form):
        def split(x, before, *parts, **more):
            constants = (
                real + 1j * imag for real, imag in zip(parts[::2], parts[1::2], strict=True)
            )
            return form(x, *constants, before, **more)

        return split

    def case(decay):
        return x, before, *(part for z in _constants(decay=decay) for part in (z.real, z.imag))

    forms.gradients_agree(of_reals(s4d.recurrent), of_reals(chunked), case(0.1), case(20.0))
