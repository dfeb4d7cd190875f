"""Rotary position embedding: angles are computed per position, never cached."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Proportional, Rope, Yarn
from layers.backends import backends


def inverse_frequencies(rope: Rope, head_width: int, max_context: int | None = None) -> np.ndarray:
    """Radians per position of the X rotating pairs, float32 [X], as transformers computes them; of
    'dynamic' those of its original context. `max_context` chooses between longrope's divisors; None
    is a model as long as its original.
    """
    width = rope.rotating(head_width)
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if isinstance(scaling, Linear):
        frequencies /= scaling.factor
    elif isinstance(scaling, Llama3):
        turns = scaling.original_context * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        ramp = (turns - low) / (high - low) if low < high else np.where(turns >= low, 1.0, 0.0)
        unchanged = np.clip(ramp, 0.0, 1.0)
    elif isinstance(scaling, Yarn):
        unchanged = _yarn_unchanged(scaling, rope.theta, width)
    elif isinstance(scaling, LongRope):
        is_long = max_context is not None and max_context > scaling.original_context
        frequencies /= np.array(scaling.long if is_long else scaling.short)
    elif isinstance(scaling, Proportional):
        turning = np.arange(len(frequencies)) < int(scaling.share * width // 2)
        frequencies = np.where(turning, frequencies / scaling.factor, 0.0)
    if isinstance(scaling, Llama3 | Yarn):
        frequencies = unchanged * frequencies + (1 - unchanged) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def _yarn_unchanged(scaling: Yarn, theta: float, width: int) -> np.ndarray:
    """Share of each pair's frequency that stays (Peng et al. 2023, section 3.2), float64 [X]."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        length = scaling.original_context / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def attention_factor(rope: Rope) -> float:
    """The factor of cos and sin that keeps the scores of a stretched model sharp."""
    scaling = rope.scaling
    if isinstance(scaling, LongRope):
        return scaling.attention_factor
    if isinstance(scaling, Yarn):
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return 1.0


def angles(
    rope: Rope, head_width: int, positions_T: jax.Array, max_context: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, times the attention factor, float32 [T, X] each; once
    for all layers, as XLA would repeat them in each layer for every head.
    """
    frequencies_X = inverse_frequencies(rope, head_width, max_context)
    angles_TX = positions_T[:, None].astype(jnp.float32) * frequencies_X
    if isinstance(rope.scaling, Dynamic):
        angles_TX *= _dynamic_stretch(rope.scaling, 2 * len(frequencies_X), positions_T)
    both_TH = jnp.concatenate([jnp.cos(angles_TX), jnp.sin(angles_TX)], axis=-1)
    both_TH *= attention_factor(rope)
    cos_TX, sin_TX = jnp.split(backends.current().computed_once(both_TH), 2, axis=-1)
    return cos_TX, sin_TX


def _dynamic_stretch(scaling: Dynamic, width: int, positions_T: jax.Array) -> jax.Array:
    """What a growing base, theta r^(w / (w - 2)), makes of each frequency: r^(-2 i / (w - 2)),
    float32 [T, X] with r = factor n / original - (factor - 1) at length n; exactly 1 up to
    the original context.
    """
    length_T = jnp.maximum(positions_T + 1, scaling.original_context).astype(jnp.float32)
    growth_T = 1 + scaling.factor * (length_T / scaling.original_context - 1)
    powers_X = np.arange(0, width, 2, dtype=np.float32) / max(width - 2, 1)
    return jnp.exp(-jnp.log(growth_T)[:, None] * powers_X)


def rotate(
    x_TNH: jax.Array, cos_TX: jax.Array, sin_TX: jax.Array, neighbours: bool = False
) -> jax.Array:
    """Rotates the pairs (i, i + X) of every head by X angles a token, elements from 2X on stay:
    float32 [T, N, H]. `neighbours` has the pairs (2i, 2i + 1), and puts them as the others lie.
    """
    pairs = cos_TX.shape[-1]
    if not backends.current().has_free_views:
        if neighbours:
            x_TNH = _halves_by_product(x_TNH, pairs)
        return _rotate_by_product(x_TNH, cos_TX, sin_TX)
    if neighbours:
        first, second = x_TNH[..., : 2 * pairs : 2], x_TNH[..., 1 : 2 * pairs : 2]
    else:
        first, second = x_TNH[..., :pairs], x_TNH[..., pairs : 2 * pairs]
    cos, sin = cos_TX[:, None], sin_TX[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    unrotated = [x_TNH[..., 2 * pairs :]] if x_TNH.shape[-1] > 2 * pairs else []
    return jnp.concatenate(turned + unrotated, axis=-1)


def _halves_by_product(x_TNH: jax.Array, pairs: int) -> jax.Array:
    """Heads with the first of all neighbours before the second ones, by an exact product."""
    order = np.arange(x_TNH.shape[-1])
    order[: 2 * pairs] = np.concatenate([order[: 2 * pairs : 2], order[1 : 2 * pairs : 2]])
    chosen_HH = np.eye(len(order), dtype=np.float32)[:, order]
    return jnp.dot(x_TNH, chosen_HH, precision=jax.lax.Precision.HIGHEST)


def _rotate_by_product(x_TNH: jax.Array, cos_TX: jax.Array, sin_TX: jax.Array) -> jax.Array:
    """`rotate` without halves of heads, whose slices and concatenation cost operations on a TPU: an
    exact product gives the other of a pair.
    """
    pairs, width = cos_TX.shape[-1], x_TNH.shape[-1]
    unrotated_TX = jnp.zeros((len(cos_TX), width - 2 * pairs))
    cos_T1H = jnp.concatenate([cos_TX, cos_TX, 1 + unrotated_TX], axis=-1)[:, None]
    sin_T1H = jnp.concatenate([sin_TX, sin_TX, unrotated_TX], axis=-1)[:, None]
    other_HH = np.eye(width, k=pairs, dtype=np.float32)  # the sign of each half is in it
    other_HH[pairs:], other_HH[:, 2 * pairs :] = 0, 0
    other_HH -= other_HH.T
    other_TNH = jnp.dot(x_TNH, other_HH, precision=jax.lax.Precision.HIGHEST)
    return x_TNH * cos_T1H + other_TNH * sin_T1H
