"""Formats that are kept as published (block FP8, MXFP8, NVFP4): numbers and products, by bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from configs.errors import InputError
from configs.precision import FORMATS, PUBLISHED
from layers import quantized
from layers.kernels.linear import low_bit, low_bit_product, packed
from layers.linear import linear
from layers.quantized import Groups
from tests.layers.native import instruction_set, need  # noqa: F401

pytestmark = pytest.mark.quick_code
E4M3 = ml_dtypes.float8_e4m3fn
WIDTHS = {"fp8_block": (512, 200, 30), "mxfp8": (512, 224, 32), "nvfp4": (512, 208, 48)}


def drawn(format: str, rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks, and by the definitions of the formats the numbers that they stand for."""
    rng, info = np.random.default_rng(seed), FORMATS[format]
    assert info.group is not None
    shape = rows, -(-width // info.group)
    codes, of_rows = rng.integers(0, 256, (rows, width), np.uint8), None
    if format == "nvfp4":
        codes &= 15
        size = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
        values = np.where(codes < 8, size, -size)
        scales = rng.integers(0, 127, shape, np.uint8).view(E4M3).astype(np.float32)
        of_rows = rng.random(rows, np.float32)
        factors = scales * of_rows[:, None]
    else:
        codes[codes & 127 == 127] = 1  # NaN
        codes = codes.view(E4M3)
        values = codes.astype(np.float32)
        scales = np.exp2(rng.integers(-100, 40, shape)).astype(np.float32)
        if format == "fp8_block":
            strips = rng.random((-(-rows // 16), shape[1]), np.float32) * 1e-3
            scales = np.repeat(strips, 16, axis=0)[:rows]
        factors = scales
    blocks = quantized.pack(format, Groups(codes, scales, None, of_rows))
    return blocks, values * np.repeat(factors, info.group, axis=1)[:, :width]


@pytest.mark.parametrize("format", PUBLISHED)
def test_blocks_are_the_numbers_of_the_definition(format):
    for width in WIDTHS[format]:
        blocks, numbers = drawn(format, 37, width)
        assert blocks.shape == (37, FORMATS[format].row_bytes(width))
        np.testing.assert_array_equal(quantized.dequantize(format, blocks, width), numbers)
        leaf = low_bit.of_blocks(blocks, format, width, "float32")
        np.testing.assert_array_equal(jax.jit(low_bit.numbers)(leaf), numbers)
        declared = low_bit.abstract((37, width), format, "float32")
        assert jax.tree.map(lambda x: (x.shape, x.dtype), leaf) == jax.tree.map(
            lambda x: (x.shape, x.dtype), declared
        )


@pytest.mark.parametrize("format", PUBLISHED)
def test_products_have_the_bits_of_those_with_the_numbers(format, instruction_set):  # noqa: F811
    """On every instruction set, beside activations of float32."""
    for rows, num_rows, width in zip((1, 3, 33), (40, 31, 100), WIDTHS[format], strict=True):
        blocks, numbers = drawn(format, num_rows, width)
        w = packed.pack_rows(blocks, format, numbers.shape)
        looked_up = jax.jit(packed.rows)(w, jnp.arange(num_rows))
        np.testing.assert_array_equal(looked_up, numbers)
        x_TD = np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)
        y_TF = jax.jit(linear)(x_TD, w)
        np.testing.assert_array_equal(y_TF, jax.jit(linear)(x_TD, packed.pack(numbers)))


@pytest.mark.parametrize("format", PUBLISHED)
def test_rows_beside_bfloat16_have_their_bits_among_any_others(format, instruction_set):  # noqa: F811
    """The matrix unit takes many rows, and a few are summed in its order."""
    blocks, numbers = drawn(format, 150, width := WIDTHS[format][1])
    w = packed.pack_rows(blocks, format, numbers.shape)
    rows = np.random.default_rng(0).standard_normal((35, width)).astype(ml_dtypes.bfloat16)
    y_TF = np.asarray(jax.jit(linear)(rows, w))
    exact = rows.astype(float) @ numbers.T
    size = np.abs(rows.astype(float)) @ np.abs(numbers).T
    assert (np.abs(y_TF - exact) <= 1e-6 * size).all()
    for count in (1, 2, 3, 4, 5, 17):
        np.testing.assert_array_equal(jax.jit(linear)(rows[:count], w), y_TF[:count])


@pytest.mark.parametrize("format", PUBLISHED)
def test_experts_have_the_bits_of_their_own_products(format):
    need()
    blocks, numbers = zip(*(drawn(format, 48, 256, seed) for seed in range(3)), strict=True)
    stack = packed.pack_rows(np.concatenate(blocks), format, (3, 48, 256))
    x_XD = np.random.default_rng(9).standard_normal((6, 256)).astype(np.float32)
    y_XF = jax.jit(packed.grouped_product)(x_XD, stack, jnp.array([2, 0, 3], jnp.int32))
    first, last = packed.pack(numbers[0]), packed.pack(numbers[2])
    np.testing.assert_array_equal(y_XF[:2], jax.jit(linear)(x_XD[:2], first))
    np.testing.assert_array_equal(y_XF[2:5], jax.jit(linear)(x_XD[2:5], last))
    np.testing.assert_array_equal(y_XF[5:], 0)


@pytest.mark.parametrize("format", PUBLISHED)
def test_products_of_xla(format):
    """A matrix, of more rows than are expanded at once, and a stack."""
    blocks, numbers = drawn(format, 1120, 512)
    w = low_bit.of_blocks(blocks, format, 512, "float32")
    x_TD = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    y_TF = jax.jit(low_bit_product.product)(x_TD, w)
    exact, size = x_TD.astype(float) @ numbers.T, np.abs(x_TD).astype(float) @ np.abs(numbers).T
    assert (np.abs(y_TF - exact) <= 1e-6 * size).all()
    stack = low_bit.of_blocks(blocks.reshape(2, 560, -1), format, 512, "float32")
    y_BWF = jax.jit(low_bit_product.products)(x_TD[:, None], stack, jnp.array([1, 2, 0]))
    of_stack = numbers.reshape(2, 560, 512)
    for x_D, y_WF, matrix in zip(x_TD[::2], y_BWF[::2], of_stack[::-1], strict=True):
        near = 1e-6 * np.abs(x_D).astype(float) @ np.abs(matrix).T
        assert (np.abs(y_WF[0] - x_D.astype(float) @ matrix.T) <= near).all()


def test_bytes_are_those_of_the_file_and_little_more():
    """16 rows have the scales of 128 x 128 numbers once; a row of NVFP4 one of the tensor's."""
    need()
    for format, file_bits in (("fp8_block", 8 + 32 / 128**2), ("nvfp4", 4.5), ("mxfp8", 8.25)):
        strips = packed.abstract((1024, 2048), format)
        for leaf in (strips, low_bit.abstract((1024, 2048), format, "bfloat16")):
            num_bytes = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf))
            assert num_bytes == FORMATS[format].bytes_for(1024 * 2048, 2048)
            assert num_bytes <= 1.01 * file_bits / 8 * 1024 * 2048


def test_rows_that_share_scales_have_the_same():
    need()
    blocks = np.concatenate([drawn("fp8_block", 8, 256, seed)[0] for seed in range(2)])
    with pytest.raises(ValueError, match="whose rows share scales in 16s"):
        packed.pack_rows(blocks, "fp8_block", (16, 256))
    with pytest.raises(ValueError, match="16 rows of a matrix that share scales have different"):
        low_bit.of_blocks(blocks, "fp8_block", 256, "float32")
    with pytest.raises(InputError, match="a matrix has rows of 40, not a multiple of nvfp4's"):
        FORMATS["nvfp4"].check_rows(40, "a matrix")
