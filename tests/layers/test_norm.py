import chex
import jax.numpy as jnp
import numpy as np
import pytest

from layers.decoder import param_infos
from layers.norm import apply, layer_norm, rms_norm
from layers.params import flatten
from tests import fakes


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 36), (2, 3, 10)])
def test_root_mean_square_becomes_one(shape, offset):
    generator = np.random.default_rng(0)
    x, weight = 7 * generator.standard_normal(shape), generator.standard_normal(shape[-1])
    found = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6, offset)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (weight + offset)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_normalized_in_float32():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64)), jnp.bfloat16)
    weight = jnp.asarray(np.linspace(0.5, 1.5, 64), jnp.bfloat16)
    found = rms_norm(x, weight, 1e-5)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    exact *= np.asarray(weight, np.float64)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_epsilon_keeps_zero_finite():
    assert not np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-5)).any()


def test_layer_norm_removes_the_mean_and_adds_a_bias():
    x, weight, bias = np.random.default_rng(2).standard_normal((3, 5, 36)) + 4
    exact = x - x.mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-2) * weight[0] + bias[0]
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, weight[0], bias[0]))
    np.testing.assert_allclose(layer_norm(*arrays, 1e-2), exact, atol=1e-5)


def test_layer_norm_without_weights_and_with_weights_less_one():
    x, weight, bias = np.random.default_rng(3).standard_normal((3, 5, 36)) + 4
    exact = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, weight[0], bias[0])]
    found = layer_norm(*arrays, 1e-5, offset=1.0)
    np.testing.assert_allclose(found, exact * (1 + weight[0]) + bias[0], atol=2e-5)
    config = fakes.llama(norm="layer_bare", norm_eps=1e-5)
    assert not any("norm" in path for path in flatten(param_infos(config)))
    np.testing.assert_allclose(apply(arrays[0], None, config), exact, atol=1e-5)
