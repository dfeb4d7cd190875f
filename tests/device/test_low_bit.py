"""Products with weights of few bits on the device at hand, by its kernels and by XLA, beside
float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.precision import FORMATS
from layers.backends import backends
from layers.kernels.linear import low_bit_product
from tests.layers.kernels.test_low_bit import drawn, tokens

pytestmark = pytest.mark.device

_FORMATS = (
    "int8", "fp8", "int4", "int4_g64", "int4_g32", "int4_asym_g64", "int3", "int3_asym_g64",
    "mxfp4",
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
    found = np.asarray(multiply(x_BTD, w, matrix_B))
    x_BTD = np.asarray(jnp.asarray(x_BTD, jnp.bfloat16), np.float64)
    kernel = backends.current().skinny_product(num_rows, w)
    is_exact = FORMATS[format].bits == 8 or kernel is not None
    for b, e in ((0, 1), (1, 0)):
        size = np.abs(x_BTD[b]) @ np.abs(numbers[e]).T
        error = np.abs(found[b] - x_BTD[b] @ numbers[e].T) / size
        assert error.max() < (2e-6 if is_exact else 2**-9), error.max()
    again = np.asarray(multiply(x_BTD, w, matrix_B))
    np.testing.assert_array_equal(again[:2], found[:2])
