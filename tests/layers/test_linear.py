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
    assert found.shape == (rows, 10) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=1e-2 if dtype == "bfloat16" else 1e-5)


def test_a_single_row_is_never_multiplied_alone():
    """XLA's CPU backend is an order of magnitude slower at it."""
    weight = jnp.ones((10, 24), jnp.bfloat16)
    text = jax.jit(linear).lower(jnp.ones((1, 24)), weight).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "tensor<2x24xbf16>" in product and "tensor<1x24xbf16>" not in product
