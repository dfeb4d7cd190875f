import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.linear import linear


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_times_transposed_weight(rows, dtype):
    generator = np.random.default_rng(rows)
    x = jnp.asarray(generator.standard_normal((rows, 24)), jnp.float32)
    weight = jnp.asarray(generator.standard_normal((10, 24)), dtype)
    found = jax.jit(linear)(x, weight)
    exact = np.asarray(x.astype(dtype), np.float64) @ np.asarray(weight, np.float64).T
    chex.assert_shape(found, (rows, 10))
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_a_single_row_is_never_multiplied_alone():
    """XLA's CPU backend is an order of magnitude slower at it."""
    weight = jnp.ones((10, 24), jnp.bfloat16)
    text = jax.jit(linear).lower(jnp.ones((1, 24)), weight).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "tensor<2x24xbf16>" in product and "tensor<1x24xbf16>" not in product


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [24, 576])
def test_bits_do_not_depend_on_the_number_of_rows(dtype, width):
    """From 8 rows on; --deterministic rests on it."""
    generator = np.random.default_rng(width)
    x = jnp.asarray(generator.standard_normal((64, width)), jnp.float32)
    weight = jnp.asarray(generator.standard_normal((50, width)), dtype)
    whole = np.asarray(jax.jit(linear)(x, weight))
    for rows in (8, 9, 16, 33):
        np.testing.assert_array_equal(np.asarray(jax.jit(linear)(x[:rows], weight)), whole[:rows])


@pytest.mark.parametrize("dtype, precisions", [("float32", 2), ("bfloat16", 0)])
def test_float32_means_float32(dtype, precisions):
    """On GPUs a product of float32 operands is TF32 unless it asks for more."""
    text = jax.jit(linear).lower(jnp.ones((8, 24)), jnp.ones((10, 24), dtype)).as_text()
    assert text.count("HIGHEST") == precisions
