"""Causal convolution of every channel by itself, over the w newest inputs.

The state of a row is its tail: the w - 1 inputs before the next one, oldest first.
"""

import itertools

import jax
import jax.numpy as jnp

from layers.recurrence.sums import rounded


def causal(
    x_YWX: jax.Array, taps_Xw: jax.Array, bias_X: jax.Array | None, tail: jax.Array
) -> jax.Array:
    """Weighted sums of inputs up to each token, float32 [Y, W, X]; a token's bits depend on neither
    Y, W nor where a row was split. The last of `taps_Xw` is the newest input's; `tail`, float32 [Y,
    w - 1, X], are the inputs before the row.
    """
    inputs, num_tokens = _with_tail(x_YWX, tail), x_YWX.shape[1]
    out_YWX = jnp.zeros_like(x_YWX) if bias_X is None else bias_X
    taps_Xw = taps_Xw.astype(jnp.float32)
    for at in range(taps_Xw.shape[1]):
        out_YWX = out_YWX + rounded(taps_Xw[:, at] * inputs[:, at : at + num_tokens])
    return out_YWX


def parts(out_YWX: jax.Array, widths: tuple[int, ...], has_silu: bool) -> tuple[jax.Array, ...]:
    """What `causal` returns, or its silu, in parts of so many channels."""
    out_YWX = jax.nn.silu(out_YWX) if has_silu else out_YWX
    return tuple(jnp.split(out_YWX, list(itertools.accumulate(widths[:-1])), axis=2))


def tails(x_YWX: jax.Array, tail: jax.Array) -> jax.Array:
    """The tails after every token of a row that began with `tail`, [Y, W, w - 1, X]."""
    starts_W = jnp.arange(1, x_YWX.shape[1] + 1)
    return _with_tail(x_YWX, tail)[:, starts_W[:, None] + jnp.arange(tail.shape[1])]


def tail_after(x_YWX: jax.Array, tail: jax.Array, num_tokens_Y: jax.Array) -> jax.Array:
    """The tails after the first 0 .. W tokens of each row that began with `tail`, [Y, w - 1, X]."""
    index = num_tokens_Y[:, None] + jnp.arange(tail.shape[1])
    return jnp.take_along_axis(_with_tail(x_YWX, tail), index[..., None], axis=1)


def _with_tail(x_YWX: jax.Array, tail: jax.Array) -> jax.Array:
    return jnp.concatenate([tail, x_YWX], axis=1)
