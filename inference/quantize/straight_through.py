"""Quantization-aware training: the forward pass computes with numbers of few bits, and gradients go
through the rounding as if it were not there (Bengio et al. 2013, arXiv 1308.3432).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from configs.precision import FORMATS, LARGEST_FP8
from inference.training.losses import Model
from layers import decoder, params
from layers.params import Params
from layers.quantized import E2M1, LEAST_SCALE


def student(config: ModelConfig, formats: Mapping[str, str]) -> Model:
    """Parameters as a model with these formats, by path, computes with them, of float32 masters;
    `config` is in float32 without formats.
    """
    infos = decoder.param_infos(config)

    def values(masters: Params, frozen: object) -> Params:
        leaves = params.flatten(masters)
        for path, format in formats.items():
            whole = leaves[path]
            leaves[path] = whole + jax.lax.stop_gradient(rounded(format, whole) - whole)
        return params.unflatten(infos, leaves)

    return values


def rounded(format: str, values: jax.Array) -> jax.Array:
    """Numbers [..., D] as `layers.quantized` rounds them, bit for bit: float32."""
    info = FORMATS[format]
    groups = values.reshape(*values.shape[:-1], -1, info.block_in(values.shape[-1]))
    top, half = jnp.abs(groups).max(-1, keepdims=True), 1 << (info.bits - 1)
    if info.asymmetric:
        low = jnp.minimum(groups.min(-1, keepdims=True), 0)
        high, levels = jnp.maximum(groups.max(-1, keepdims=True), 0), (1 << info.bits) - 1
        scale = _divided(high - low, levels)
        zero = jnp.rint(-low * _inverse(scale))
        q = jnp.clip(jnp.rint(groups * _inverse(scale)) + zero, 0, levels) - zero
    elif format == "mxfp4":
        scale = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(top, 2.0**-120))) - 2)
        nearest = jnp.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, jnp.abs(groups) / scale)
        q = jnp.sign(groups) * jnp.asarray(E2M1)[nearest]
    elif "fp8" in format:
        scale = _divided(top, LARGEST_FP8)
        ratio = jnp.clip(groups * _inverse(scale), -LARGEST_FP8, LARGEST_FP8)
        q = ratio.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    elif info.bits == 8:
        scale = _divided(top, half - 1)
        q = jnp.rint(groups * _inverse(scale))
    else:
        scale = _divided(top, half - 0.5)
        q = jnp.clip(jnp.rint(groups * _inverse(scale)), -half, half - 1)
    return (q * scale).reshape(values.shape)


def _divided(x: jax.Array, divisor: float) -> jax.Array:
    """x / divisor as IEEE has it: of a constant XLA takes the reciprocal, and the largest number of
    a group, which lies in the middle of two, would go the other way.
    """
    return x / (x * 0 + divisor)


def _inverse(scale: jax.Array) -> jax.Array:
    is_there = scale >= LEAST_SCALE
    return jnp.where(is_there, 1 / jnp.where(is_there, scale, 1), 0)
