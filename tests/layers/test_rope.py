"""Rotary positions against formulas written another way."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Proportional, Rope, Yarn
from layers import rope
from tests import accelerators

_LLAMA3 = Rope(500_000.0, Llama3(8.0, 1.0, 4.0, 8192))


def _llama3_by_wavelength(rope_config: Rope, head_width: int) -> np.ndarray:
    """Llama 3.1's rule as it is published: by wavelength, one pair after the other."""
    rule = rope_config.scaling
    low = rule.original_context / rule.low_freq_factor
    high = rule.original_context / rule.high_freq_factor
    frequencies = []
    for pair in range(head_width // 2):
        frequency = rope_config.theta ** (-2 * pair / head_width)
        wavelength = 2 * math.pi / frequency
        if wavelength > low:
            frequency /= rule.factor
        elif wavelength >= high:
            smooth = rule.original_context / wavelength - rule.low_freq_factor
            smooth /= rule.high_freq_factor - rule.low_freq_factor
            frequency = (1 - smooth) * frequency / rule.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


@pytest.mark.parametrize(("theta", "head_width"), [(10_000.0, 64), (1e6, 256), (100.0, 10)])
def test_frequencies_fall_geometrically(theta, head_width):
    found = rope.inverse_frequencies(Rope(theta), head_width)
    expected = [math.exp(-2 * i / head_width * math.log(theta)) for i in range(head_width // 2)]
    chex.assert_type(found, np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_linear_scaling_stretches_all_frequencies():
    plain, stretched = Rope(10_000.0), Rope(10_000.0, Linear(8.0))
    expected = rope.inverse_frequencies(plain, 64) / 8
    np.testing.assert_allclose(rope.inverse_frequencies(stretched, 64), expected, rtol=1e-6)


@pytest.mark.parametrize(("share", "width", "turning"), [(0.25, 512, 64), (0.25, 10, 1), (1, 6, 3)])
def test_of_a_share_of_the_pairs_the_first_turn(share, width, turning):
    """As fast as they would if all did."""
    found = rope.inverse_frequencies(Rope(1e6, Proportional(share)), width)
    every = rope.inverse_frequencies(Rope(1e6), width)
    assert len(found) == width // 2 and not found[turning:].any()
    np.testing.assert_array_equal(found[:turning], every[:turning])
    stretched = rope.inverse_frequencies(Rope(1e6, Proportional(share, 8.0)), width)
    np.testing.assert_allclose(stretched, found / 8, rtol=1e-6)


def test_llama3_scaling_has_three_branches():
    found = rope.inverse_frequencies(_LLAMA3, 128)
    np.testing.assert_allclose(found, _llama3_by_wavelength(_LLAMA3, 128), rtol=1e-6)
    ratio = rope.inverse_frequencies(Rope(_LLAMA3.theta), 128) / found
    assert ratio[0] == 1 and math.isclose(ratio[-1], 8, rel_tol=1e-5)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_llama3_scaling_may_be_a_step():
    """As of Llama 4 Scout: pairs turn once in the original context, or are stretched whole."""
    plain = rope.inverse_frequencies(Rope(5e5), 128)
    step = rope.inverse_frequencies(Rope(5e5, Llama3(16.0, 1.0, 1.0, 8192)), 128)
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(step, np.where(turns >= 1, plain, plain / 16), rtol=1e-6)


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


def test_dynamic_scaling_grows_the_base_with_a_tokens_own_length():
    """The base as emozilla published it, token by token; nothing changes in the old context."""
    factor, original, width = 4.0, 32, 16
    position = np.arange(100)
    scaled, plain = Rope(500.0, Dynamic(factor, original)), Rope(500.0)
    cos, sin = rope.angles(scaled, width, jnp.asarray(position))
    old_cos, old_sin = rope.angles(plain, width, jnp.asarray(position))
    np.testing.assert_array_equal(cos[:original], old_cos[:original])
    np.testing.assert_array_equal(sin[:original], old_sin[:original])
    length = np.maximum(position + 1, original)
    base = 500.0 * (factor * length / original - (factor - 1)) ** (width / (width - 2))
    angle = position[:, None] / base[:, None] ** (np.arange(0, width, 2) / width)
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-4)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    """The ramp of the paper: by turns in the original context, where its ends are not rounded."""
    scaling = Yarn(8.0, 2048, truncate=False)
    found = rope.inverse_frequencies(Rope(10_000.0, scaling), 128)
    plain = rope.inverse_frequencies(Rope(10_000.0), 128)
    turns = 2048 * plain / (2 * math.pi)
    np.testing.assert_allclose(found[turns > 32], plain[turns > 32], rtol=1e-6)
    np.testing.assert_allclose(found[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (plain / found)[(turns < 32) & (turns > 1)]
    assert ((between > 1) & (between < 8)).all() and (np.diff(between) > 0).all()
    assert math.isclose(rope.attention_factor(Rope(scaling=scaling)), 0.1 * math.log(8) + 1)
    assert rope.attention_factor(Rope(scaling=Yarn(8.0, 2048, attention_factor=0.7))) == 0.7


def test_longrope_divides_by_the_context_that_a_model_may_grow_to():
    scaled = Rope(10_000.0, LongRope((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), 64, 1.25))
    plain = rope.inverse_frequencies(Rope(10_000.0), 6)
    for context, divisors in ((64, (1, 2, 3)), (65, (4, 5, 6)), (None, (1, 2, 3))):
        found = rope.inverse_frequencies(scaled, 6, context)
        np.testing.assert_allclose(found, plain / np.array(divisors), rtol=1e-6)
    cos, sin = rope.angles(scaled, 6, jnp.arange(5), 65)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-5)


def test_a_share_of_each_head_rotates():
    rule, x_TNH = Rope(share=0.75), np.random.default_rng(0).standard_normal((5, 2, 8))
    cos, sin = rope.angles(rule, 8, jnp.arange(5))
    found = rope.rotate(jnp.asarray(x_TNH, jnp.float32), cos, sin)
    chex.assert_shape(cos, (5, 3))
    np.testing.assert_array_equal(found[..., 6:], x_TNH[..., 6:].astype(np.float32))
    alone = rope.rotate(
        jnp.asarray(x_TNH[..., :6], jnp.float32), *rope.angles(Rope(), 6, jnp.arange(5))
    )
    np.testing.assert_array_equal(found[..., :6], alone)


@pytest.mark.parametrize("platform", accelerators.KINDS)
@pytest.mark.parametrize("pairs", [64, 24])
def test_accelerators_rotate_the_same(platform, pairs):
    rng = np.random.default_rng(0)
    x, angles = rng.normal(size=(5, 3, 128)), rng.uniform(-9, 9, (5, pairs))
    arrays = [jnp.asarray(each, jnp.float32) for each in (x, np.cos(angles), np.sin(angles))]
    found = jax.jit(accelerators.written_for(platform, rope.rotate))(*arrays)
    np.testing.assert_allclose(found, rope.rotate(*arrays), atol=2e-6)
    np.testing.assert_array_equal(found[..., 2 * pairs :], arrays[0][..., 2 * pairs :])
