"""The numbers of a GGUF file's blocks, bit for bit those that the package `gguf` reads."""

import gguf
import numpy as np
import pytest

from layers import quantized

KINDS = {"q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q4_k": "Q4_K",
         "q5_k": "Q5_K", "q6_k": "Q6_K", "q3_k": "Q3_K", "q2_k": "Q2_K",
         "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS", "mxfp4": "MXFP4"}  # fmt: skip
# Where the blocks that the package does not make have their float16 scales.
SCALES = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q3_k": (108,), "q2_k": (80, 82),
          "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": ()}  # fmt: skip
F, D = 48, 512


def drawn(format: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of random numbers, and what the package makes of them."""
    kind = gguf.GGMLQuantizationType[KINDS[format]]
    generator = np.random.default_rng(0)
    if format in SCALES:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = generator.integers(0, 256, (F, D // elements, size), np.uint8)
        for offset in SCALES[format]:
            own = generator.standard_normal((F, D // elements, 1)).astype(np.float16)
            blocks[:, :, offset : offset + 2] = own.view(np.uint8)
        if format == "mxfp4":
            blocks[:, :, 0] = blocks[:, :, 0] // 2 + 64  # no numbers below float32's normal ones
        blocks = blocks.reshape(F, -1)
    else:
        blocks = gguf.quantize(generator.standard_normal((F, D)).astype(np.float32), kind)
    return blocks, gguf.dequantize(blocks, kind)


@pytest.mark.parametrize("format", KINDS)
def test_blocks_are_dequantized_bit_for_bit(format):
    blocks, numbers = drawn(format)
    assert np.isfinite(numbers).all()
    found = quantized.dequantize(format, blocks, D)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, numbers)
