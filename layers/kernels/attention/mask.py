"""Which keys a query sees: one mask for the reference and every kernel.

A key is known by its KV position: its index in the cache of its sequence. A query sees a range of
them, of which a tree of drafts leaves out its other branches (Miao et al. 2023, arXiv 2305.09781).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.ragged import Rectangle


class MaskBounds(NamedTuple):
    """The KV positions that each query of a rectangle sees."""

    last_YW: jax.Array  # i32[Y, W], included
    first_YW: jax.Array | None = None  # i32[Y, W]; None without a window
    # Of a tree: where the row's own tokens begin, and which of them are seen (bit j: the j-th).
    tree_start_YW: jax.Array | None = None  # i32[Y, W]
    tree_bits_YW: jax.Array | None = None  # i32[Y, W]
    # Keys before it are seen, too, whatever `first_YW` says; None: there are none.
    head_YW: jax.Array | None = None  # i32[Y, W]


def mask_bounds(
    rectangle: Rectangle, window: int | None, chunked: bool = False, first_tokens: int = 0
) -> MaskBounds:
    """The mask of a rectangle as data. A window counts positions, from the query's own back, over a
    cache without dropped tokens; `chunked` and `first_tokens` are `CacheSpec`'s. Raises ValueError
    if a row of a tree is longer than `tree_bits_YW` has bits.
    """
    position_YW, ancestors_YW = rectangle.position_YW, rectangle.ancestors_YW
    first_YW = head_YW = None
    if window is not None:
        oldest_YW = position_YW // window * window if chunked else position_YW - window + 1
        first_YW = jnp.maximum(oldest_YW, 0)
    if first_tokens:
        head_YW = jnp.full_like(position_YW, first_tokens)
    if rectangle.start_YW is not None:
        first_YW, head_YW = (
            None if x_YW is None else rectangle.start_YW + x_YW for x_YW in (first_YW, head_YW)
        )
    newest_YW = jnp.where(rectangle.valid_YW, rectangle.kv_position_YW, 0)
    newest_Y1 = jnp.max(newest_YW, axis=1, keepdims=True)
    if ancestors_YW is not None:
        if position_YW.shape[1] > 32:
            raise ValueError("a tree has at most 32 tokens, the bits of a query")
        is_ancestor_YWW = (ancestors_YW[:, :, None] >> jnp.arange(position_YW.shape[1])) & 1 == 1
        if rectangle.causal_Y is not None:
            is_ancestor_YWW |= ~rectangle.causal_Y[:, None, None]
        if first_YW is not None:  # a KV position says nothing of a draft's position
            is_live_YWW = position_YW[:, None, :] >= first_YW[:, :, None]
            if head_YW is not None:
                is_live_YWW |= position_YW[:, None, :] < head_YW[:, :, None]
            is_ancestor_YWW &= is_live_YWW
        bit_W = jnp.int32(1) << jnp.arange(position_YW.shape[1])
        tree_bits_YW = jnp.where(is_ancestor_YWW, bit_W, 0).sum(2)
        tree_start_YW = jnp.broadcast_to(position_YW[:, :1], position_YW.shape)
        last_YW = jnp.broadcast_to(newest_Y1, position_YW.shape)
        return MaskBounds(last_YW, first_YW, tree_start_YW, tree_bits_YW, head_YW)
    last_YW = rectangle.kv_position_YW
    if rectangle.causal_Y is not None:
        last_YW = jnp.where(rectangle.causal_Y[:, None], last_YW, newest_Y1)
    return MaskBounds(last_YW, first_YW, head_YW=head_YW)


def on_chip(bounds: MaskBounds, chip: jax.Array | int, chips: int) -> MaskBounds:
    """Bounds by index among the tokens that one of `chips` holds, those whose KV position is `chip`
    modulo their number: `last_YW` is -1 where it holds none that a query sees. Without trees.
    """

    def num_before(position_YW: jax.Array) -> jax.Array:  # that the chip holds
        return -((chip - position_YW) // chips)

    assert bounds.tree_start_YW is None, "branches lie on one chip"
    first_YW, head_YW = (
        None if x_YW is None else num_before(x_YW) for x_YW in (bounds.first_YW, bounds.head_YW)
    )
    return MaskBounds(num_before(bounds.last_YW + 1) - 1, first_YW, head_YW=head_YW)


def visible(
    kv_position: jax.Array,
    last: jax.Array,
    first: jax.Array | None = None,
    tree_start: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    head: jax.Array | None = None,
) -> jax.Array:
    """Whether the key at a KV position is seen; `MaskBounds`' fields, in shapes that broadcast."""
    mask = kv_position <= last
    if first is not None:
        is_live = kv_position >= first
        if head is not None:
            is_live |= kv_position < head
            if tree_start is not None:  # of a tree's own tokens its bits have said it
                is_live |= kv_position >= tree_start
        mask &= is_live
    if tree_start is not None and tree_bits is not None:
        nth = kv_position - tree_start
        mask &= (nth < 0) | ((tree_bits >> jnp.clip(nth, 0, 31)) & 1 == 1)
    return mask
