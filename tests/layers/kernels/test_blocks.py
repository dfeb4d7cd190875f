"""Products with blocks, a GGUF file's and ours, against float64, on every instruction set."""

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.precision import FORMATS, PUBLISHED
from layers import quantized
from layers.kernels.linear import packed
from layers.linear import linear
from tests.layers.native import instruction_set, need  # noqa: F401

_SCALES = {"q8_0": (0,), "q5_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2),
           "q5_k": (0, 2), "q6_k": (208,), "q3_k": (108,), "q2_k": (80, 82),
           "iq4_nl": (0,), "iq4_xs": (0,)}  # fmt: skip
_ALL = (*_SCALES, *quantized.OURS)
# One of each way to multiply.
_FORMATS = (
    *_SCALES,
    "int8",
    "w8a8",
    "fp8",
    "int4_g64",
    "int4_asym",
    "int3",
    "int3_asym_g32",
    "mxfp4",
)
_ROWS = 1, 2, 3, 5, 8, 9, 11, 12, 16, 17, 31, 33, 40


def _packed(blocks_FX: np.ndarray, format: str, width: int) -> packed.Packed:
    """A matrix, or a stack, of blocks [.., F, bytes of a row]."""
    shape = *blocks_FX.shape[:-1], width
    return packed.pack_rows(blocks_FX.reshape(-1, blocks_FX.shape[-1]), format, shape)


def _drawn(format, F, D, seed=0):
    """Random blocks, whose scales have any size (of GGUF's both signs, float16's smallest too), and
    their numbers.
    """
    if format in quantized.OURS:
        rng = np.random.default_rng(seed)
        size = 10.0 ** rng.integers(-4, 1, (F, D // 32, 1))
        values_FD = (rng.standard_normal((F, D // 32, 32)) * size).reshape(F, D)
        blocks = quantized.quantize(format, values_FD.astype(np.float32))
        return blocks, quantized.dequantize(format, blocks, D)
    kind = gguf.GGMLQuantizationType[format.upper()]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (F, D // elements, size), np.uint8)
    for offset in _SCALES[format]:
        shape = F, D // elements, 1
        scales = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 0, shape)
        blocks[:, :, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(F, -1), gguf.dequantize(blocks.reshape(F, -1), kind)


def _rounded(x_TD, format):
    """Activations as the kernels round them: int8, by a 127th of the largest of 32, or of all; or
    e4m3; not at all beside weights of e4m3.
    """
    if format == "fp8":
        return x_TD
    if format == "w8a8_fp8":
        return np.asarray(packed.rounded_to_fp8(x_TD))
    groups = x_TD.reshape(len(x_TD), -1, x_TD.shape[1] if format == "w8a8" else 32)
    top = np.abs(groups).max(-1, keepdims=True)
    integers = np.rint(groups * (np.float32(127) / np.maximum(top, np.float32(1e-30))))
    return (integers * (top / np.float32(127)).astype(np.float64)).reshape(x_TD.shape)


def test_a_token_that_is_not_finite_is_nowhere_a_number():
    """As it is beside XLA's products, and no other token knows."""
    need()
    x_TD = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    w = _packed(_drawn("w8a8_fp8", 40, 256)[0], "w8a8_fp8", 256)
    expected = np.asarray(jax.jit(linear)(x_TD, w))
    x_TD[1, 9], x_TD[3, 200] = np.nan, np.inf
    found = np.asarray(jax.jit(linear)(x_TD, w))
    assert np.isnan(found[[1, 3]]).all()
    np.testing.assert_array_equal(found[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "int8", "int4_asym", "mxfp4"])
def test_exact_products_leave_activations_as_they_are(format):
    """One product, and rows in groups: a group is empty, and a row is behind all of them."""
    need()
    blocks_FX, numbers_FD = _drawn(format, 40, 256)
    x_TD = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    w, stack = (_packed(values, format, 256) for values in (
        blocks_FX, np.stack([blocks_FX, blocks_FX, blocks_FX[::-1]])))  # fmt: skip
    sizes_E = jnp.array([2, 0, 3], jnp.int32)
    exact_TF = x_TD.astype(np.float64) @ numbers_FD.T
    grouped_TF = np.concatenate([exact_TF[:2], exact_TF[2:5, ::-1], 0 * exact_TF[5:]])
    near = 1e-6 * np.abs(x_TD).astype(np.float64) @ np.abs(numbers_FD).T
    with packed.exact(True):
        found_TF = np.asarray(jax.jit(linear)(x_TD, w))
        found_XF = np.asarray(jax.jit(packed.grouped_product)(x_TD, stack, sizes_E))
    assert (np.abs(found_TF - exact_TF) <= near).all()
    assert (np.abs(found_XF - grouped_TF) <= np.maximum(near, near[:, ::-1])).all()
    assert not (np.abs(np.asarray(jax.jit(linear)(x_TD, w)) - exact_TF) <= near).all()


def test_every_block_format_is_tested():
    assert {*_ALL, *PUBLISHED} == set(packed.BLOCKS)  # the latter in test_scaled_floats.py


@pytest.mark.parametrize("format", _ALL)
def test_rows_are_the_librarys_numbers(format):
    need()
    for F, D in (37, 256), (16, 512), (3, 1280):
        blocks, numbers = _drawn(format, F, D)
        matrix = _packed(blocks, format, D)
        found = jax.jit(packed.rows)(matrix, jnp.arange(F))
        np.testing.assert_array_equal(found, numbers)
        assert matrix.data.nbytes >= FORMATS[format].bytes_for(F * D, D)


def _check(format, T, F, D):
    blocks, numbers = _drawn(format, F, D, seed=T)
    x_TD = np.random.default_rng(T).standard_normal((T, D)).astype(np.float32)
    x_TD[:, 32:64] = 0
    y_TF = jax.jit(linear)(x_TD, _packed(blocks, format, D))
    # A number between two int8 may go either way: it is as good as what it is rounded to.
    rounded_TD = _rounded(x_TD, format).astype(np.float64)
    exact = rounded_TD @ numbers.astype(np.float64).T
    size = np.abs(rounded_TD) @ np.abs(numbers).T.astype(np.float64)
    chex.assert_shape(y_TF, (T, F))
    chex.assert_type(y_TF, jnp.float32)
    error = np.abs(np.asarray(y_TF, np.float64) - exact) / np.where(size == 0, 1, size)
    assert np.median(error) < 1e-6 and error.max() < 1e-3


@pytest.mark.parametrize("format", _ALL)
def test_products_are_exact_up_to_their_sums(instruction_set, format):  # noqa: F811
    for T, F, D in (1, 40, 512), (7, 16, 256), (12, 100, 256), (33, 31, 768), (2, 5, 256):
        _check(format, T, F, D)


@pytest.mark.long
def test_500_random_products(instruction_set):  # noqa: F811
    rng = np.random.default_rng(0)
    for _ in range(500):
        T, F, blocks = (int(2 ** rng.uniform(0, most)) for most in (7, 9, 4))
        _check(str(rng.choice(_ALL)), T, F, blocks * 256)


@pytest.mark.parametrize("format", _FORMATS)
def test_a_row_has_the_same_bits_in_any_company(instruction_set, format):  # noqa: F811
    blocks, _ = _drawn(format, 100, 256)
    w = _packed(blocks, format, 256)
    x_TD = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    whole = np.asarray(jax.jit(linear)(x_TD, w))
    for rows in _ROWS:
        np.testing.assert_array_equal(jax.jit(linear)(x_TD[:rows], w), whole[:rows])
        np.testing.assert_array_equal(jax.jit(linear)(x_TD[-rows:], w), whole[-rows:])
    is_used_T1 = np.arange(40)[:, None] % 5 < 3
    found = jax.jit(linear)(np.where(is_used_T1, x_TD, 0), w)
    np.testing.assert_array_equal(found, np.where(is_used_T1, whole, 0))


@pytest.mark.parametrize("format", _FORMATS)
def test_groups_of_rows_have_the_bits_of_their_products(instruction_set, format):  # noqa: F811
    """Of a stack of matrices, of which none needs to be whole strips."""
    drawn = [_drawn(format, 37, 256, seed)[0] for seed in range(4)]
    w = _packed(np.stack(drawn), format, 256)
    x_XD = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    for sizes in ((1, 0, 1, 0), (17, 0, 3, 12), (0, 40, 0, 0)):
        sizes_E = np.array(sizes, np.int32)
        found = np.asarray(jax.jit(packed.grouped_product)(x_XD, w, sizes_E))
        start = 0
        for blocks, size in zip(drawn, sizes, strict=True):
            matrix = _packed(blocks, format, 256)
            rows = slice(start, start + size)
            np.testing.assert_array_equal(found[rows], jax.jit(linear)(x_XD[rows], matrix))
            start = rows.stop
        assert not found[start:].any()


@pytest.mark.parametrize("format", _FORMATS)
def test_what_is_not_finite_makes_its_row_nan_and_no_other(instruction_set, format):  # noqa: F811
    blocks, _ = _drawn(format, 32, 256)
    w = _packed(blocks, format, 256)
    for bad in (np.nan, np.inf, -np.inf):
        for rows in (1, 16):
            x_TD = -np.ones((rows, 256), np.float32)
            x_TD[0, 77] = bad
            found = np.asarray(jax.jit(linear)(x_TD, w))
            assert not np.isfinite(found[0]).any() and np.isfinite(found[1:]).all()
            assert format == "fp8" or np.isnan(found[0]).all()


def test_bfloat16_activations_are_what_they_are_in_float32():
    need()
    blocks, _ = _drawn("q8_0", 32, 256)
    w = _packed(blocks, "q8_0", 256)
    x_TD = np.random.default_rng(0).standard_normal((5, 256)).astype(jnp.bfloat16)
    found, wide = jax.jit(linear)(x_TD, w), jax.jit(linear)(x_TD.astype(np.float32), w)
    np.testing.assert_array_equal(found, wide)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_row_that_is_one_block_has_any_size(format):
    """The rest of its last group is zeros."""
    need()
    values_FD = np.random.default_rng(0).standard_normal((37, 41)).astype(np.float32)
    blocks = quantized.quantize(format, values_FD)
    w = _packed(blocks, format, 41)
    numbers = quantized.dequantize(format, blocks, 41)
    np.testing.assert_array_equal(jax.jit(packed.rows)(w, jnp.arange(37)), numbers)
    found = jax.jit(linear)(np.eye(41, dtype=np.float32), w)
    np.testing.assert_allclose(found, numbers.T, rtol=1e-6)


@pytest.mark.parametrize("format", _FORMATS)
def test_no_rows_and_wrong_blocks(format):
    need()
    blocks, _ = _drawn(format, 5, 256)
    w = _packed(blocks, format, 256)
    assert jax.jit(linear)(jnp.zeros((0, 256)), w).shape == (0, 5)
    beyond = jax.jit(packed.rows)(w, jnp.array([-7, 0, 4, 1 << 30]))
    np.testing.assert_array_equal(beyond[::3], beyond[1:3])
    for wrong, width in ((blocks, 512), (blocks[:, :-1], 256), (blocks.view(np.int8), 256)):
        with pytest.raises(ValueError, match="blocks|bytes"):
            _packed(wrong, format, width)
