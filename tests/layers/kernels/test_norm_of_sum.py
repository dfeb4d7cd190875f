"""Norms that add to the residual stream: Hopper's kernel, interpreted, beside float64, and the
models whose layers leave their sums to the next norm.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import decoder, norm
from layers.backends import backends
from layers.backends.cpu import XlaCpu
from layers.kernels.norm import gpu
from layers.ragged import contiguous
from tests import compiling, fakes
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

_EPS = 1e-5


def check(T, D, has_addend, has_bias, offset, dtype, weights_dtype, seed=0, interpret=HOPPER):
    """Sums exactly, and their norms within the rounding of float32, or of `dtype`."""
    draw = functools.partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    x_TD = draw((T, D)) + 3
    addend_TD = draw((T, D)) if has_addend else None
    weight_D = jnp.asarray(draw(D), weights_dtype)
    bias_D = jnp.asarray(draw(D), weights_dtype) if has_bias else None
    normed_TD, sum_TD = compiling.call(
        gpu.of_sum, x_TD, addend_TD, weight_D, bias_D,
        eps=_EPS, offset=offset, dtype=dtype, interpret=interpret,
    )  # fmt: skip
    assert normed_TD.dtype == dtype and sum_TD.dtype == jnp.float32
    expected = x_TD if addend_TD is None else x_TD + addend_TD
    np.testing.assert_array_equal(sum_TD, expected)
    expected = expected.astype(np.float64)
    size_TD = np.abs(expected)  # of what is rounded before it may cancel
    if has_bias:
        mean_T1 = expected.mean(-1, keepdims=True)
        expected, size_TD = expected - mean_T1, size_TD + np.abs(mean_T1)
    rms_T1 = np.sqrt((expected**2).mean(-1, keepdims=True) + _EPS)
    scale_TD = (np.asarray(weight_D, np.float64) + offset) / rms_T1
    expected, size_TD = expected * scale_TD, size_TD * np.abs(scale_TD)
    if has_bias:
        bias_D = np.asarray(bias_D, np.float64)
        expected, size_TD = expected + bias_D, size_TD + np.abs(bias_D)
    bound_TD = 2**-21 * size_TD + (2**-8 * np.abs(expected) if dtype == "bfloat16" else 0)
    assert (np.abs(np.asarray(normed_TD, np.float64) - expected) <= bound_TD).all()
    check_races(interpret)


CASES = [  # T, D, has_addend, has_bias, offset, dtype, weights_dtype
    (1, 512, True, False, 0.0, "bfloat16", "bfloat16"),
    (3, 576, True, False, 1.0, "float32", "float32"),
    (2, 576, True, True, 0.0, "bfloat16", "bfloat16"),
    (2, 136, False, True, 1.0, "float32", "bfloat16"),
    (2, 384, False, False, 0.0, "float32", "float32"),
]  # fmt: skip


@pytest.mark.parametrize("T, D, has_addend, has_bias, offset, dtype, weights_dtype", CASES)
def test_a_gpus_kernel_equals_float64(T, D, has_addend, has_bias, offset, dtype, weights_dtype):
    """Of widths that threads divide and of others, whose last elements two spans hold."""
    assert gpu.can_normalize(D)
    check(T, D, has_addend, has_bias, offset, dtype, weights_dtype)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_random_rows_of_a_gpu(seed):
    generator = np.random.default_rng(seed)
    has_addend, has_bias, has_offset, is_half, has_halves = generator.integers(0, 2, 5) > 0
    T, D = int(generator.integers(1, 5)), 8 * int(generator.integers(16, 200))
    dtypes = ["bfloat16" if half else "float32" for half in (is_half, has_halves)]
    check(T, D, has_addend, has_bias, float(has_offset), *dtypes, seed)


def test_widths_without_a_kernel():
    assert not gpu.can_normalize(127) and not gpu.can_normalize(16385)
    assert backends.HOPPER.norm_of_sum(4096) is gpu.of_sum
    assert backends.GPU.norm_of_sum(4096) is backends.XLA_CPU.norm_of_sum(4096) is None


@dataclasses.dataclass(frozen=True)
class _AddsInNorms(XlaCpu):
    """XLA's products, and norms that add: what a kernel computes, by jnp."""

    def norm_of_sum(self, width):
        return _of_sum


def _of_sum(x_TD, addend_TD, weight_D, bias_D, eps, offset, dtype):
    sum_TD = x_TD if addend_TD is None else x_TD + addend_TD
    if bias_D is None:
        normed_TD = norm.rms_norm(sum_TD, weight_D, eps, offset)
    else:
        normed_TD = norm.layer_norm(sum_TD, weight_D, bias_D, eps, offset)
    return normed_TD.astype(dtype), sum_TD


_MODELS = {
    "pre-norms": fakes.llama,
    "residual scales, parallel norms": fakes.side_by_side,
    "layer inputs, layer scales": fakes.gemma4,
}
_MORE_MODELS = {
    "post-norms": fakes.gemma,
    "quirks": fakes.quirks,
    "factors, linear attention": fakes.linear,
    "hyper-connections": fakes.compressed,
    "states": fakes.hybrid,
    "experts": fakes.deepseek,
}


@pytest.mark.parametrize(
    "model",
    [*_MODELS.values(), *(pytest.param(m, marks=pytest.mark.long) for m in _MORE_MODELS.values())],
    ids=[*_MODELS, *_MORE_MODELS],
)
def test_layers_leave_their_sums_to_the_next_norm(model):
    """The same hidden states and streams as where each layer adds."""
    config = model()
    params, ragged = fakes.real_params(config), contiguous(2, 4)
    tokens_T = jnp.arange(8, dtype=jnp.int32) % config.vocab_size

    def outputs(params):
        x_TD = decoder.embedded(params, config, tokens_T, ragged)
        output = decoder.layers(
            params, config, x_TD, ragged, tokens_T=tokens_T, features=(1, config.num_layers)
        )
        return output.hidden_TD, output.streams

    results = []
    for backend in (backends.XLA_CPU, _AddsInNorms()):
        with backends.use(backend):
            results.append(compiling.call(outputs, params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *results)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_kernels_derivative_is_that_of_its_reference(has_bias):
    draw = np.random.default_rng(0).standard_normal
    arrays = *draw((2, 3, 8)), *draw((2, 8))
    x_TD, addend_TD, weight_D, bias_D = (jnp.asarray(array, jnp.float32) for array in arrays)
    config = fakes.llama(norm="layer" if has_bias else "rms")
    weights = {"weight": weight_D, "bias": bias_D} if has_bias else weight_D

    def loss(*arrays):
        normed_TD, sum_TD = norm.of_sum(*arrays, config)
        return jnp.sum(normed_TD**3) + jnp.sum(sum_TD**2)

    results = []
    for backend in (backends.XLA_CPU, _AddsInNorms()):
        with backends.use(backend):
            results.append(jax.grad(loss, (0, 1, 2))(x_TD, addend_TD, weights))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *results)
