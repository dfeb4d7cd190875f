"""Rotary position embedding: angles are computed per position, never cached."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import Rope


def inverse_frequencies(rope: Rope, head_width: int) -> np.ndarray:
    """Radians per position of each of the H/2 rotating pairs, float32 [H/2].

    'linear' is position interpolation (Chen et al. 2023, arXiv 2306.15595); 'llama3' that of
    Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783), as transformers computes it.
    """
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if rope.scaling == "linear":
        frequencies /= rope.factor
    elif rope.scaling == "llama3":
        turns = rope.original_context * frequencies / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies.astype(np.float32)


def angles(rope: Rope, head_width: int, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, float32 [T, H/2] each.

    They pass through a product with the identity, which changes no bit: XLA's CPU backend would
    otherwise compute them again inside each layer, for every head.
    """
    angles_TX = positions_T[:, None].astype(jnp.float32) * inverse_frequencies(rope, head_width)
    both_TH = jnp.concatenate([jnp.cos(angles_TX), jnp.sin(angles_TX)], axis=-1)
    same_TH = jnp.dot(both_TH, jnp.eye(head_width), precision=jax.lax.Precision.HIGHEST)
    cos_TX, sin_TX = jnp.split(same_TH, 2, axis=-1)
    return cos_TX, sin_TX


def rotate(x_TNH: jax.Array, cos_TX: jax.Array, sin_TX: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head, X = H/2 angles a token: float32 [T, N, H]."""
    first, second = jnp.split(x_TNH, 2, axis=-1)
    cos, sin = cos_TX[:, None], sin_TX[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
