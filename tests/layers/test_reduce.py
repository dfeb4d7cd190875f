"""Sums that do not depend on the rows beside them."""

import jax
import numpy as np
import pytest

from layers.reduce import log_sum_exp, row_sum, sums_before


@pytest.mark.parametrize("width", [10, 64, 576, 1536, 49152])
def test_bits_do_not_depend_on_the_number_of_rows(width):
    x = np.random.default_rng(0).standard_normal((96, width)).astype(np.float32)
    whole = np.asarray(jax.jit(row_sum)(x))
    for rows in (1, 2, 7, 8, 16, 40):
        np.testing.assert_array_equal(np.asarray(jax.jit(row_sum)(x[:rows])), whole[:rows])
    np.testing.assert_allclose(whole[:, 0], x.astype(np.float64).sum(-1), atol=2e-3)


@pytest.mark.parametrize("width", [1, 40, 72])
def test_sums_before_each_entry(width):
    x = np.random.default_rng(0).random((96, width)).astype(np.float32)
    whole = np.asarray(jax.jit(sums_before)(x))
    for rows in (1, 2, 7, 8, 16, 40):
        np.testing.assert_array_equal(np.asarray(jax.jit(sums_before)(x[:rows])), whole[:rows])
    expected = np.cumsum(x.astype(np.float64), -1) - x
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    assert not whole[:, 0].any()


@pytest.mark.parametrize("width", [7, 2048])
def test_log_sum_exp_equals_numpy_in_float64(width):
    x = np.random.default_rng(1).standard_normal((9, width)).astype(np.float32) * 20
    x[3, 2:] = -np.inf
    expected = np.logaddexp.reduce(x.astype(np.float64), axis=-1)
    np.testing.assert_allclose(np.asarray(log_sum_exp(x)), expected, rtol=1e-6)


def test_log_sum_exp_says_what_is_not_finite():
    x = np.zeros((4, 5), np.float32)
    x[0, 1], x[1, 2], x[2] = np.nan, np.inf, -np.inf
    total = np.asarray(log_sum_exp(x))
    assert np.isnan(total[0]) and not np.isfinite(total[1]) and total[2] == -np.inf
    assert np.isfinite(total[3])
