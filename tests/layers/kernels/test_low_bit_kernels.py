"""The accelerators' kernels for planes of bits, interpreted, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.linear import low_bit, low_bit_tpu
from tests.layers.kernels.test_low_bit import drawn, tokens

# Format, rows, F and D; F is no multiple of a kernel's tile.
_CASES = [
    ("int4", 1, 40, 256), ("int4_asym_g32", 7, 600, 512), ("int4_g64", 33, 130, 768),
    ("int3", 5, 600, 1024), ("int3_asym_g64", 16, 130, 1024), ("mxfp4", 3, 520, 512),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_tpus_kernel_is_exact_up_to_its_sums(case, dtype):
    """Of bfloat16 activations, too: integers are multiplied, and scales weigh sums. A block of no
    matrix is skipped.
    """
    format, T, F, D = case
    w, numbers = drawn(format, 2, F, D, dtype=dtype)
    x_BTD = tokens(3, T, D)
    assert low_bit_tpu.can_multiply(T, w)
    multiply = jax.jit(low_bit_tpu.products, static_argnames="interpret")
    matrix_B = jnp.array([1, 2, 0], jnp.int32)
    found = multiply(x_BTD, w, matrix_B, interpret=True)
    assert found.shape == (3, T, F) and found.dtype == jnp.float32
    x_BTD = np.asarray(jnp.asarray(x_BTD, dtype), np.float64)
    for b, e in ((0, 1), (2, 0)):
        size = np.abs(x_BTD[b]) @ np.abs(numbers[e]).T
        error = np.abs(found[b] - x_BTD[b] @ numbers[e].T)
        assert (error < 2e-7 * size).all()


@pytest.mark.parametrize("format", ["int4_asym_g64", "mxfp4"])
def test_a_row_has_the_same_bits_in_any_company(format):
    w, _ = drawn(format, 1, 130, 512, dtype="bfloat16")
    x_TD = tokens(40, 512)
    multiply = jax.jit(low_bit_tpu.products, static_argnames="interpret")

    def run(x_TD):
        return np.asarray(multiply(x_TD[None], w, jnp.zeros(1, jnp.int32), interpret=True)[0])

    whole = run(x_TD)
    for rows in (1, 7, 33):
        np.testing.assert_array_equal(run(x_TD[:rows]), whole[:rows])
        np.testing.assert_array_equal(run(x_TD[-rows:]), whole[-rows:])


def test_what_the_kernel_leaves_to_xla():
    """Many rows, rows of the matrix that are no whole lanes, and eight bits."""
    for rows, format, D in (
        (129, "int4", 4096), (1, "int4_g32", 576), (1, "int8", 4096), (128, "int3_g32", 4096),
        (1, "int3", 512),
    ):  # fmt: skip
        w = low_bit.abstract((1, 256, D), format, "bfloat16")
        assert not low_bit_tpu.can_multiply(rows, w)
