"""Blocks of few bits: what is packed comes back, and rounding is to the nearest."""

import chex
import numpy as np
import pytest

from configs.precision import FORMATS, OURS
from layers import quantized


@pytest.mark.parametrize("format", OURS)
def test_blocks_come_back_and_have_the_declared_bytes(format):
    values_FD = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    blocks = quantized.quantize(format, values_FD)
    assert blocks.dtype == np.uint8
    assert blocks.nbytes == FORMATS[format].bytes_for(values_FD.size, 256)
    groups = quantized.unpack(format, blocks, 256)
    np.testing.assert_array_equal(quantized.pack(format, groups), blocks)
    numbers = quantized.dequantize(format, blocks, 256)
    again = quantized.rounded(format, numbers, groups.scale_FG, groups.zero_FG)
    np.testing.assert_array_equal(again.q_FD, groups.q_FD)  # what is on the grid stays


@pytest.mark.parametrize("format", [name for name in OURS if FORMATS[name].bits < 8])
def test_no_number_of_a_group_is_nearer(format):
    """Of all codes, in the group's own scale."""
    values_FD = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    groups = quantized.unpack(format, quantized.quantize(format, values_FD), 128)
    found = quantized.numbers(format, groups)
    codes = range(16 if FORMATS[format].bits == 4 else 8)
    others = [
        quantized.numbers(
            format,
            quantized.Groups(np.full_like(groups.q_FD, code), groups.scale_FG, groups.zero_FG),
        )
        for code in codes
    ]
    nearest = np.abs(np.stack(others) - values_FD).min(0)
    np.testing.assert_allclose(np.abs(found - values_FD), nearest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", OURS)
def test_numbers_too_small_for_a_scale_are_zeros(format):
    values_FD = np.full((1, 128), 1e-37, np.float32)
    values_FD[0, 3] = 0
    with np.errstate(all="raise", under="ignore"):
        blocks = quantized.quantize(format, values_FD)
    assert np.abs(quantized.dequantize(format, blocks, 128)).max() <= 1e-36


def test_a_stack_is_its_matrices():
    values_EFD = np.random.default_rng(2).standard_normal((2, 3, 64)).astype(np.float32)
    blocks = quantized.quantize("int4_g64", values_EFD)
    each = [quantized.quantize("int4_g64", values_FD) for values_FD in values_EFD]
    np.testing.assert_array_equal(blocks, np.stack(each))
    numbers = quantized.dequantize("int4_g64", blocks, 64)
    chex.assert_equal_shape([numbers, values_EFD])


def test_parts_that_do_not_go_together_are_named():
    groups = quantized.unpack(
        "int4_g32", quantized.quantize("int4_g32", np.ones((2, 64), np.float32)), 64
    )
    with pytest.raises(ValueError, match="int4_asym_g32 needs zero points"):
        quantized.pack("int4_asym_g32", groups)
    with pytest.raises(ValueError, match="scales do not go with"):
        quantized.pack("int4_g64", groups)
    with pytest.raises(ValueError, match="bytes are not a row of 96"):
        quantized.unpack("int4_g32", np.zeros((2, 40), np.uint8), 96)
    with pytest.raises(ValueError, match="'q4_0' is none of"):
        quantized.quantize("q4_0", np.ones((1, 32), np.float32))
