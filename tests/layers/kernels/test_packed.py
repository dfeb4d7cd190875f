"""Products with packed weights against float64, on every instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.linear import packed
from layers.linear import linear
from tests.layers.native import instruction_set, need  # noqa: F401

_SHAPES = [(1, 576, 960), (2, 64, 272), (3, 64, 40), (5, 33, 17), (7, 6, 5), (13, 96, 130),
           (16, 576, 64), (17, 96, 48), (33, 64, 100), (48, 160, 31), (130, 64, 48)]  # fmt: skip


def _drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
def test_products_are_exact_up_to_their_sums(instruction_set, weights, inputs):  # noqa: F811
    """The matrix unit takes bfloat16 only, and rounds what it gets."""
    rounds = instruction_set == "amx" and weights == "bfloat16"
    for T, D, F in _SHAPES:
        x_TD, w_FD = _drawn(T, T, D, dtype=inputs), _drawn(D, F, D, dtype=weights)
        found = np.asarray(jax.jit(linear)(x_TD, packed.pack(w_FD)))
        x_TD = x_TD.astype(jnp.bfloat16) if rounds else x_TD
        exact = x_TD.astype(np.float64) @ w_FD.astype(np.float64).T
        size = np.abs(x_TD.astype(np.float64)) @ np.abs(w_FD.astype(np.float64)).T
        assert found.shape == (T, F) and found.dtype == np.float32
        assert (np.abs(found - exact) / size).max() < 2e-7 * np.sqrt(D) + 1e-6


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(instruction_set, weights):  # noqa: F811
    x_TD, w = _drawn(0, 150, 96), packed.pack(_drawn(1, 100, 96, dtype=weights))
    whole = np.asarray(jax.jit(linear)(x_TD, w))
    for rows in (1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 32, 33, 64, 149):
        np.testing.assert_array_equal(jax.jit(linear)(x_TD[:rows], w), whole[:rows])
        np.testing.assert_array_equal(jax.jit(linear)(x_TD[-rows:], w), whole[-rows:])


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_rows_of_a_packed_table_are_its_rows(instruction_set, weights):  # noqa: F811
    table_VD = _drawn(0, 37, 18, dtype=weights)
    ids = jnp.array([0, 36, 15, 16, 0])
    found = jax.jit(packed.rows)(packed.pack(table_VD), ids)
    np.testing.assert_array_equal(found, table_VD[ids].astype(np.float32))


def test_other_matrices_are_refused():
    need()
    with pytest.raises(ValueError, match="float16"):
        packed.pack(np.zeros((16, 32), np.float16))
