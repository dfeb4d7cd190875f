"""What a query sees: one mask for the reference and every kernel.

A key is known by its place in the cache of its sequence. A query sees a range of places, of which a
tree of drafts leaves out its other branches (Miao et al. 2023, arXiv 2305.09781).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.ragged import Rectangle


class Sight(NamedTuple):
    """The places that each query of a rectangle sees."""

    last_CW: jax.Array  # i32[C, W]
    first_CW: jax.Array | None = None  # i32[C, W]; None without a window
    # Of a tree: where the row's own tokens begin, and which of them are seen (bit j: the j-th).
    own_CW: jax.Array | None = None  # i32[C, W]
    bits_CW: jax.Array | None = None  # i32[C, W]


def sight_of(rectangle: Rectangle, window: int | None) -> Sight:
    """The mask of a rectangle as data. A window counts positions, the query's own included, and
    looks back only.
    """
    position_CW, ancestors_CW = rectangle.position_CW, rectangle.ancestors_CW
    first_CW = None if window is None else jnp.maximum(position_CW - window + 1, 0)
    newest_C1 = jnp.max(jnp.where(rectangle.valid_CW, rectangle.place_CW, 0), 1, keepdims=True)
    if ancestors_CW is not None:
        assert position_CW.shape[1] <= 32, "a tree has at most 32 tokens, the bits of a query"
        seen_CWW = (ancestors_CW[:, :, None] >> jnp.arange(position_CW.shape[1])) & 1 == 1
        if rectangle.causal_C is not None:
            seen_CWW |= ~rectangle.causal_C[:, None, None]
        if first_CW is not None:  # a place says nothing of a draft's position
            seen_CWW &= position_CW[:, None, :] >= first_CW[:, :, None]
        bits_CW = jnp.where(seen_CWW, jnp.int32(1) << jnp.arange(position_CW.shape[1]), 0).sum(2)
        own_CW = jnp.broadcast_to(position_CW[:, :1], position_CW.shape)
        last_CW = jnp.broadcast_to(newest_C1, position_CW.shape)
        return Sight(last_CW, first_CW, own_CW, bits_CW)
    if rectangle.causal_C is None:
        return Sight(position_CW, first_CW)
    return Sight(jnp.where(rectangle.causal_C[:, None], position_CW, newest_C1), first_CW)


def visible(
    place: jax.Array,
    last: jax.Array,
    first: jax.Array | None = None,
    own: jax.Array | None = None,
    bits: jax.Array | None = None,
) -> jax.Array:
    """Whether the key at a place is seen: the fields of a `Sight`, in shapes that broadcast."""
    mask = place <= last
    if first is not None:
        mask &= place >= first
    if own is not None and bits is not None:
        nth = place - own
        mask &= (nth < 0) | ((bits >> jnp.clip(nth, 0, 31)) & 1 == 1)
    return mask
