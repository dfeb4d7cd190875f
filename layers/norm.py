"""Normalization, always in float32."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from layers.backends import backends
from layers.backends.backend import SumNorm
from layers.reduce import row_sum
from sharding import collectives


def apply(
    x: jax.Array,
    weights: jax.Array | Mapping[str, jax.Array] | None,
    config: ModelConfig,
    is_divided: bool = False,
) -> jax.Array:
    """The model's norm over the last axis, which a mesh may divide: float32 of x's shape.
    `weights` None: the model's norms have none.
    """
    with jax.named_scope("norm"):
        weight, bias = _terms(weights, config, x.shape[-1])
        if bias is not None:
            return layer_norm(x, weight, bias, config.norm_eps, config.norm_offset)
        chips = collectives.num_chips(collectives.HEADS)
        if is_divided and chips > 1:
            squares = collectives.total(row_sum(x * x), collectives.HEADS) / (x.shape[-1] * chips)
            scale = jax.lax.rsqrt(squares + config.norm_eps)
            return x * scale * (weight.astype(jnp.float32) + config.norm_offset)
        return rms_norm(x, weight, config.norm_eps, config.norm_offset)


def of_sum(
    x_TD: jax.Array,
    addend_TD: jax.Array | None,
    weights: jax.Array | Mapping[str, jax.Array] | None,
    config: ModelConfig,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """`apply` of x + addend, float32 or (by a back end's kernel) the `dtype` that its reader rounds
    to, and that sum, float32 [T, D]; None adds nothing.
    """
    kernel = backends.current().norm_of_sum(x_TD.shape[-1])
    if kernel is None:
        sum_TD = x_TD if addend_TD is None else x_TD + addend_TD
        return apply(sum_TD, weights, config), sum_TD
    with jax.named_scope("norm"):
        normalize = _of_sum(kernel, config.norm_eps, config.norm_offset, dtype)
        return normalize(x_TD, addend_TD, *_terms(weights, config, x_TD.shape[-1]))


def _terms(
    weights: jax.Array | Mapping[str, jax.Array] | None, config: ModelConfig, width: int
) -> tuple[jax.Array, jax.Array | None]:
    """Weights and biases of the model's norm; no bias: it is RMSNorm."""
    if weights is None:
        assert config.norm == "layer_bare", "weights of a norm are missing"
        return jnp.ones(width), jnp.zeros(width)
    if isinstance(weights, Mapping):
        return weights["weight"], weights["bias"]
    return weights, jnp.zeros_like(weights) if config.norm == "layer_unbiased" else None


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) over the last axis: float32 of x's shape.
    `offset` is added to the stored weight (Gemma stores w - 1).
    """
    return _rms_norm(eps, offset)(x.astype(jnp.float32), weight)


def layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, offset: float = 0.0
) -> jax.Array:
    """LayerNorm (Ba et al. 2016, arXiv 1607.06450) over the last axis: float32 of x's shape.
    `offset` is added to the stored weight (Nemotron stores w - 1).
    """
    return _layer_norm(eps, offset)(x.astype(jnp.float32), weight, bias)


def gated_norm(
    x_TX: jax.Array,
    gate_TX: jax.Array,
    weight: jax.Array,
    eps: float,
    width: int | None,
    norms_first: bool,
    dtype: str = "float32",
) -> jax.Array:
    """RMSNorm of what a gate lets pass, x silu(gate), or a gate behind the norm: [T, X] of float32
    or (by a back end's kernel) the `dtype` that its reader rounds to. So many elements are normed
    together (None: all of X); where X is fewer, the chips of a mesh hold the others.
    """
    with jax.named_scope("norm"):
        gate_TX = jax.nn.silu(gate_TX)
        x_TX = x_TX if norms_first else x_TX * gate_TX
        width = width or x_TX.shape[1]
        kernel = backends.current().norm_of_sum(width)
        if kernel is not None and width == x_TX.shape[1] and not norms_first:
            return _of_sum(kernel, eps, 0.0, dtype)(x_TX, None, weight, None)[0]
        x_TGX = x_TX.reshape(x_TX.shape[0], -1, min(width, x_TX.shape[1]))
        squares_TG1 = row_sum(x_TGX * x_TGX)
        if width > x_TX.shape[1]:
            squares_TG1 = collectives.total(squares_TG1, collectives.HEADS)
        x_TGX = x_TGX * jax.lax.rsqrt(squares_TG1 / width + eps)
        x_TX = x_TGX.reshape(x_TX.shape) * weight.astype(jnp.float32)
        return x_TX * gate_TX if norms_first else x_TX


@functools.cache  # one function for all layers
def _rms_norm(eps: float, offset: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def reference(x: jax.Array, weight: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
        return x * scale * (weight.astype(jnp.float32) + offset)

    return backends.kernel_or(reference, lambda rows, x, w: rows.norm(x, w, None, eps, offset))


@functools.cache
def _layer_norm(
    eps: float, offset: float
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    def reference(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        x = x - row_sum(x) / x.shape[-1]
        scale = jax.lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
        weight = weight.astype(jnp.float32)
        return x * scale * (weight + offset if offset else weight) + bias.astype(jnp.float32)

    return backends.kernel_or(
        reference, lambda rows, x, w, bias: rows.norm(x, w, bias, eps, offset)
    )


@functools.cache
def _of_sum(
    kernel: SumNorm, eps: float, offset: float, dtype: str
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def reference(
        x_TD: jax.Array, addend_TD: jax.Array | None, weight: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        sum_TD = x_TD if addend_TD is None else x_TD + addend_TD
        if bias is None:
            normed_TD = rms_norm(sum_TD, weight, eps, offset)
        else:
            normed_TD = layer_norm(sum_TD, weight, bias, eps, offset)
        return normed_TD.astype(dtype), sum_TD

    return backends.differentiable(
        functools.partial(kernel, eps=eps, offset=offset, dtype=dtype), reference
    )
