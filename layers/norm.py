"""Normalization, always in float32."""

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from layers.params import ParamInfo
from layers.reduce import row_sum


def info(config: ModelConfig, width: int, axis: str | None) -> ParamInfo:
    """Declaration of a norm's weight, [width]; at random it changes nothing: weight + offset = 1
    for the offsets of 0 and 1 that families have.
    """
    return ParamInfo((width,), config.dtype, (axis,), "zeros" if config.norm_offset else "ones")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) over the last axis: float32 of x's shape.

    `offset` is added to the stored weight (Gemma stores w - 1).
    """
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return x * scale * (weight.astype(jnp.float32) + offset)
