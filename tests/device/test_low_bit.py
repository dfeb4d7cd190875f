"""Products with weights of few bits on the device at hand, by its kernels and by XLA, beside
float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.precision import FORMATS
from layers.backends import backends
from layers.kernels.linear import low_bit_product, skinny_gpu
from layers.linear import linear
from tests.device.hopper import hopper  # noqa: F401
from tests.layers.kernels.test_low_bit import drawn, tokens
from tests.layers.kernels.test_low_bit_kernels import GPU_CASES, check

pytestmark = pytest.mark.device

_FORMATS = (
    "int8", "fp8", "int4", "int4_g64", "int4_g32", "int4_asym_g64", "int3", "int3_asym_g64",
    "mxfp4", "fp8_block", "mxfp8", "nvfp4",
)  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 16, 33, 200])
@pytest.mark.parametrize("format", _FORMATS)
def test_products_are_exact_up_to_their_sums(format, num_rows):
    """Few rows are multiplied by kernels, as integers; for many, and by XLA, fewer than eight bits
    are expanded first, rounded to bfloat16. The same bits again.
    """
    word = backends.current().word
    w, numbers = drawn(format, 2, 1024, 4096, dtype="bfloat16", word=word)
    x_BTD, matrix_B = tokens(3, num_rows, 4096), jnp.array([1, 0, 2], jnp.int32)
    multiply = jax.jit(low_bit_product.products)
    result = np.asarray(multiply(x_BTD, w, matrix_B))
    x_BTD = np.asarray(jnp.asarray(x_BTD, jnp.bfloat16), np.float64)
    kernel = backends.current().skinny_product(num_rows, w)
    is_exact = FORMATS[format].bits == 8 or kernel is not None
    for b, e in ((0, 1), (1, 0)):
        size = np.abs(x_BTD[b]) @ np.abs(numbers[e]).T
        error = np.abs(result[b] - x_BTD[b] @ numbers[e].T) / size
        assert error.max() < (2e-6 if is_exact else 2**-9), error.max()
    again = np.asarray(multiply(x_BTD, w, matrix_B))
    np.testing.assert_array_equal(again[:2], result[:2])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_small_matrices_are_multiplied_up_to_their_sums(case):
    """In few tiles, which clusters share, and of blocks without a matrix."""
    check(jax.jit(skinny_gpu.products), case, "bfloat16", np.uint16, None)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 18, 64])
def test_products_of_arrays_are_exact_up_to_their_sums(num_rows):
    """Of few rows by the kernel; the same bits again, with blocks in any order."""
    w_FD = jnp.asarray(tokens(6144, 4096, seed=0), jnp.bfloat16)
    x_TD = jnp.asarray(tokens(num_rows, 4096), jnp.bfloat16)
    multiply = jax.jit(linear)
    result = np.asarray(multiply(x_TD, w_FD))
    x_TD64, w_FD64 = np.asarray(x_TD, np.float64), np.asarray(w_FD, np.float64)
    size = np.abs(x_TD64) @ np.abs(w_FD64).T
    assert (np.abs(result - x_TD64 @ w_FD64.T) < 2e-6 * size).all()
    for _ in range(3):
        np.testing.assert_array_equal(multiply(x_TD, w_FD), result)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_a_gate_of_a_product_is_that_of_its_sums(format, num_rows):
    w, numbers = drawn(format, 1024, 2048, dtype="bfloat16", word=backends.current().word)
    x_TD = jnp.asarray(tokens(num_rows, 2048) / 32, jnp.bfloat16)

    def multiply(x_TD, w):
        return backends.current().gated_product(x_TD, w, "silu", "float32")

    result = jax.jit(multiply)(x_TD, w)
    if result is None:
        pytest.skip("the device's back end has no such product")
    gate_TF, up_TF = np.split(np.asarray(x_TD, np.float64) @ numbers.T, 2, axis=1)
    expected = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
