"""Rotary positions against formulas written another way."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from configs.model import Rope
from layers import rope

_LLAMA3 = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def _llama3_by_wavelength(rope_config: Rope, head_width: int) -> np.ndarray:
    """Llama 3.1's rule as it is published: by wavelength, one pair after the other."""
    low = rope_config.original_context / rope_config.low_freq_factor
    high = rope_config.original_context / rope_config.high_freq_factor
    frequencies = []
    for pair in range(head_width // 2):
        frequency = rope_config.theta ** (-2 * pair / head_width)
        wavelength = 2 * math.pi / frequency
        if wavelength > low:
            frequency /= rope_config.factor
        elif wavelength >= high:
            smooth = rope_config.original_context / wavelength - rope_config.low_freq_factor
            smooth /= rope_config.high_freq_factor - rope_config.low_freq_factor
            frequency = (1 - smooth) * frequency / rope_config.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


@pytest.mark.parametrize(("theta", "head_width"), [(10_000.0, 64), (1e6, 256), (100.0, 10)])
def test_frequencies_fall_geometrically(theta, head_width):
    found = rope.inverse_frequencies(Rope(theta), head_width)
    expected = [math.exp(-2 * i / head_width * math.log(theta)) for i in range(head_width // 2)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_linear_scaling_stretches_all_frequencies():
    plain, stretched = Rope(10_000.0), Rope(10_000.0, "linear", 8.0)
    expected = rope.inverse_frequencies(plain, 64) / 8
    np.testing.assert_allclose(rope.inverse_frequencies(stretched, 64), expected, rtol=1e-6)


def test_llama3_scaling_has_three_branches():
    found = rope.inverse_frequencies(_LLAMA3, 128)
    np.testing.assert_allclose(found, _llama3_by_wavelength(_LLAMA3, 128), rtol=1e-6)
    ratio = rope.inverse_frequencies(Rope(_LLAMA3.theta), 128) / found
    assert ratio[0] == 1 and math.isclose(ratio[-1], 8, rel_tol=1e-5)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_rotation_is_multiplication_by_a_complex_number():
    generator, width = np.random.default_rng(0), 10
    x_TNH = generator.standard_normal((7, 3, width)).astype(np.float32)
    position_T = np.array([0, 1, 2, 50, 777, 4095, 8191], np.int32)
    cos, sin = rope.angles(Rope(10_000.0), width, jnp.asarray(position_T))
    found = np.asarray(rope.rotate(jnp.asarray(x_TNH), cos, sin))
    angle = position_T[:, None] * 10_000.0 ** (-2 * np.arange(width // 2) / width)
    pairs = x_TNH[..., : width // 2] + 1j * x_TNH[..., width // 2 :]
    turned = pairs * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=2e-3)
    np.testing.assert_array_equal(found[0], x_TNH[0])


def test_products_depend_on_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 64)).astype(np.float32)

    def product(query_position: int, key_position: int) -> float:
        cos, sin = rope.angles(Rope(), 64, jnp.array([query_position, key_position]))
        rotated_q, rotated_k = rope.rotate(q, cos[:1], sin[:1]), rope.rotate(k, cos[1:], sin[1:])
        return float((rotated_q * rotated_k).sum())

    assert math.isclose(product(9, 4), product(1009, 1004), abs_tol=1e-3)
    assert not math.isclose(product(9, 4), product(9, 5), abs_tol=1e-2)
