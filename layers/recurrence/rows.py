"""Recurrent states over a step's rectangles: where each row begins, and what is kept of it.

A recurrence has two forms. `recurrent` goes token by token and tells the state after each, which
decoding keeps, as any draft may be the last that stands. `chunked` computes a chunk of tokens at
once and tells the state behind it. Without rounding they are equal.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.backends import backends
from layers.kernels.recurrence import reference
from layers.ragged import Rectangle
from layers.recurrence import convolution

MOST_CHUNK = 64  # tokens that are computed at once

Inputs = tuple[jax.Array | None, ...]  # arrays [Y, W, ...] of each token, or None


class Recurrence(NamedTuple):
    """One recurrence in both forms.

    Attributes:
        shape: of a sequence's state.
        recurrent: (*inputs, state before each row [Y, ...]) -> outputs [Y, W, ...] and the states
            after every token [Y, W, ...].
        chunked: (*inputs, states before, resumes, tokens of a chunk) -> outputs and the states
            after every chunk [Y, C, ...]. `resumes` is None or, of one row, which chunks start from
            another state, bool[C], and from which, [C, ...].
        in_place: `recurrent` by a kernel: (*inputs, states of all sequences, rows that follow none
            of the others) -> outputs and the states with this step's; None: no kernel takes them.
    """

    shape: tuple[int, ...]
    recurrent: Callable[..., tuple[jax.Array, jax.Array]]
    chunked: Callable[..., tuple[jax.Array, jax.Array]]
    in_place: Callable[..., tuple[jax.Array, jax.Array] | None] | None = None


def recur(
    recurrence: Recurrence,
    inputs: Inputs,
    states: jax.Array | None,
    rectangle: Rectangle,
    is_sequential: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Feeds a rectangle's tokens to a recurrence: the outputs [Y, W, ...], and the states with this
    step's.

    Args:
        inputs: of each token, [Y, W, ...]; those of padding leave a state as it is.
        states: float32 [slots + 1, 1 + k, ...], of all sequences; None: rows begin at zero.
        is_sequential: prompts go token by token too, so that bits do not depend on how they were
            cut.
    """
    rows, width = rectangle.position_YW.shape
    if states is None:
        before_Y = jnp.zeros((rows, *recurrence.shape))
        if is_sequential:
            return _token_by_token(recurrence, inputs, before_Y)[0], None
        return recurrence.chunked(*inputs, before_Y, None, MOST_CHUNK)[0], None
    if not rectangle.is_chained:
        updated = None
        fits = width <= states.shape[1]
        if recurrence.in_place is not None and fits and not is_sequential:
            updated = recurrence.in_place(*inputs, states, rectangle)
        return updated or reference.update(recurrence.recurrent, inputs, states, rectangle)
    before_Y, follows_Y = reference.before(states, rectangle), _follows(rectangle)
    if is_sequential:
        out_YW, after_Y = _row_by_row(recurrence, inputs, before_Y, follows_Y)
        return out_YW, _keep_last(states, rectangle, after_Y)
    chunk = width if width <= MOST_CHUNK else math.gcd(width, MOST_CHUNK)
    parts = width // chunk
    is_new_C = jnp.zeros((rows, parts), bool).at[:, 0].set(~follows_Y).reshape(-1)
    before_C = jnp.repeat(before_Y, parts, axis=0)
    chain = jax.tree.map(lambda x: x.reshape(1, rows * width, *x.shape[2:]), inputs)
    out_1Z, after_1C = recurrence.chunked(
        *chain, jnp.zeros((1, *recurrence.shape)), (is_new_C, before_C), chunk
    )
    after_Y = after_1C[0, parts - 1 :: parts]
    return out_1Z.reshape(rows, width, *out_1Z.shape[2:]), _keep_last(states, rectangle, after_Y)


def convolve(
    x_YWX: jax.Array,
    taps_Xw: jax.Array,
    bias_X: jax.Array | None,
    tails: jax.Array | None,
    rectangle: Rectangle,
    widths: tuple[int, ...],
    has_silu: bool = True,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """A causal convolution of each channel, whose state is its newest w - 1 inputs, and silu: parts
    of `widths` channels, float32 [Y, W, X] each, and the tails with this step's.

    Args:
        taps_Xw: w taps a channel, the newest token's last.
        tails: float32 [slots + 1, 1 + k, w - 1, X]; None: rows begin at zero.
    """
    rows, width, X = x_YWX.shape
    if tails is not None and not rectangle.is_chained and width <= tails.shape[1]:
        kernel = backends.current().convolution(widths)
        if kernel is not None:
            return kernel(x_YWX, taps_Xw, bias_X, tails, rectangle, widths, has_silu)
    if tails is None:
        before_YwX = jnp.zeros((rows, taps_Xw.shape[1] - 1, X))
    else:
        before_YwX = reference.before(tails, rectangle)
    if rectangle.is_chained:
        before_YwX = _chained_tails(x_YWX, before_YwX, rectangle)
    out_YWX = convolution.causal(x_YWX, taps_Xw, bias_X, before_YwX)
    outs = convolution.parts(out_YWX, widths, has_silu)
    if tails is None:
        return outs, None
    if rectangle.is_chained:
        after_YwX = convolution.tail_after(x_YWX, before_YwX, _lengths(rectangle))
        return outs, _keep_last(tails, rectangle, after_YwX)
    return outs, reference.keep_each(tails, rectangle, convolution.tails(x_YWX, before_YwX))


def _chained_tails(x_YWX: jax.Array, own_YwX: jax.Array, rectangle: Rectangle) -> jax.Array:
    """The newest inputs before each row, where a row may follow the one before it."""

    def follow(last_wX: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_WX, own_wX, follows, length = row
        before_wX = jnp.where(follows, last_wX, own_wX)
        after_1wX = convolution.tail_after(x_WX[None], before_wX[None], length[None])
        return after_1wX[0], before_wX

    inputs = x_YWX, own_YwX, _follows(rectangle), _lengths(rectangle)
    return jax.lax.scan(follow, own_YwX[0], inputs)[1]


def _lengths(rectangle: Rectangle) -> jax.Array:
    """Valid tokens of each row, i32[Y]."""
    return rectangle.valid_YW.sum(1, dtype=jnp.int32)


def _follows(rectangle: Rectangle) -> jax.Array:
    """Whether a row goes on where the one before it stops: bool[Y]."""
    start_Y, slot_Y = rectangle.position_YW[:, 0], rectangle.slot_Y
    goes_on = (slot_Y[1:] == slot_Y[:-1]) & (start_Y[1:] == (start_Y + _lengths(rectangle))[:-1])
    return jnp.pad(goes_on & rectangle.valid_YW[1:, 0], (1, 0))


def _keep_last(states: jax.Array, rectangle: Rectangle, after_Y: jax.Array) -> jax.Array:
    goes_on_Y = jnp.pad(_follows(rectangle)[1:], (0, 1))
    is_kept_Y = rectangle.valid_YW[:, 0] & ~goes_on_Y
    slot_Y = jnp.where(is_kept_Y, rectangle.slot_Y, states.shape[0] - 1)
    last_Y = rectangle.position_YW[:, 0] + _lengths(rectangle) - 1
    return states.at[slot_Y, last_Y % states.shape[1]].set(after_Y)


def _token_by_token(
    recurrence: Recurrence, inputs: Inputs, before_Y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def feed(state_Y: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
        token = jax.tree.map(lambda x: x[:, None], token)
        out_Y1, after_Y1 = recurrence.recurrent(*token, state_Y)
        return after_Y1[:, 0], out_Y1[:, 0]

    tokens_WY = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), inputs)
    after_Y, out_WY = jax.lax.scan(feed, before_Y, tokens_WY)
    return jnp.swapaxes(out_WY, 0, 1), after_Y


def _row_by_row(
    recurrence: Recurrence, inputs: Inputs, before_Y: jax.Array, follows_Y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`_token_by_token` of a chain: each row follows the one before it, or has its own state."""

    def feed(
        carried: jax.Array, row: tuple[Inputs, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        token, before, follows = row
        token = jax.tree.map(lambda x: x[None], token)
        before = jnp.where(follows, carried, before)[None]
        out_1W, after_1 = _token_by_token(recurrence, token, before)
        return after_1[0], (out_1W[0], after_1[0])

    _, (out_YW, after_Y) = jax.lax.scan(feed, before_Y[0], (inputs, before_Y, follows_Y))
    return out_YW, after_Y
