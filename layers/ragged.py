"""How mixers see a step: rectangles of query tokens, each row belonging to one sequence.

A step packs decode rows [Y, 1 + k] and prefill chunks [Y, chunk tokens] into one [T]. Token-wise
layers see [T, D]; mixers look at the rectangles, whose rows know their slot, positions and pages.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sharding import collectives
from sharding.collectives import CONTEXT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rectangle:
    """Y rows of W query tokens, which lie in the cache one after another.

    Without `ancestors_YW` a row is a chain: consecutive tokens of a sequence, whose index in the
    cache is their position. With it a row is a tree of drafts, the root first: a position follows
    from the depth, so branches share positions but no KV positions. `is_chained` relates rows: one
    may go on where the row before it stops, as chunks of one prompt do.

    Padding tokens stand at the newest valid token's place in the cache, so they widen no range. In
    a tree that is no token's position: ranges of positions are of valid tokens.
    """

    slot_Y: jax.Array  # i32[Y], the last slot is the sink of padding rows
    position_YW: jax.Array  # i32[Y, W]
    valid_YW: jax.Array  # bool[Y, W]
    tables: tuple[jax.Array, ...]  # i32[Y, P] a page group; entry 0 is the sink page
    # u32[Y, W], W <= 32: bit j says that a token sees the row's j-th; a chain's i-th has the
    # lowest i + 1 bits. None: every row is a chain.
    ancestors_YW: jax.Array | None = None
    causal_Y: jax.Array | None = None  # bool[Y], False: a row's tokens see each other; None: True
    # i32[Y], tokens of earlier pages that the cache has no more, whole pages: what is behind them
    # lies so much earlier. None: there are none; a tree knows of none.
    num_dropped_Y: jax.Array | None = None
    # i32[Y, W], where in its row a token's sequence begins, of rows that hold several, which do not
    # see each other (`packed`). None: at the row's start.
    start_YW: jax.Array | None = None
    is_chained: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.position_YW.size

    def first(self, width: int) -> "Rectangle":
        """The first tokens of each row."""
        ancestors_YW = self.ancestors_YW
        return dataclasses.replace(
            self,
            position_YW=self.position_YW[:, :width],
            valid_YW=self.valid_YW[:, :width],
            ancestors_YW=None if ancestors_YW is None else ancestors_YW[:, :width],
        )

    @property
    def kv_position_YW(self) -> jax.Array:
        """i32[Y, W]: where in its sequence's cache each token lies."""
        if self.start_YW is not None:
            return self.position_YW + self.start_YW
        if self.num_dropped_Y is not None:
            return self.position_YW - self.num_dropped_Y[:, None]
        if self.ancestors_YW is None:
            return self.position_YW
        nth_W = jnp.arange(self.position_YW.shape[1], dtype=jnp.int32)
        return jnp.where(self.valid_YW, self.position_YW[:, :1] + nth_W, self.position_YW)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged:
    """The rectangles of one step, in packing order, and filler tokens behind them, which give
    products the number of rows that `deterministic` needs.
    """

    rectangles: tuple[Rectangle, ...]
    num_fillers: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def position_T(self) -> jax.Array:
        """i32[T]: position of each packed token in its sequence."""
        return self.pack([r.position_YW for r in self.rectangles])

    @property
    def slot_T(self) -> jax.Array:
        """i32[T]: slot of each packed token; fillers have slot 0."""
        return self.pack(
            [jnp.broadcast_to(r.slot_Y[:, None], r.valid_YW.shape) for r in self.rectangles]
        )

    @property
    def valid_T(self) -> jax.Array:
        """bool[T]: False for padding."""
        return self.pack([r.valid_YW for r in self.rectangles])

    @property
    def undropped(self) -> "Ragged":
        """As layers with a window see it, whose pages nothing but the window drops."""
        whole = (dataclasses.replace(r, num_dropped_Y=None) for r in self.rectangles)
        return dataclasses.replace(self, rectangles=tuple(whole))

    def pack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One [Y, W, ...] a rectangle -> [T, ...]; fillers are 0."""
        x_T = jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
        return jnp.pad(x_T, ((0, self.num_fillers), *[(0, 0)] * (x_T.ndim - 1)))

    def split(self, x: jax.Array) -> list[jax.Array]:
        """[T, ...] -> one [Y, W, ...] a rectangle."""
        parts, start = [], 0
        for rectangle in self.rectangles:
            part = x[start : start + rectangle.num_tokens]
            parts.append(part.reshape(*rectangle.position_YW.shape, *x.shape[1:]))
            start += rectangle.num_tokens
        return parts

    def page_T(self, group: int, page_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Page id and offset of each token's cache entry, i32[T] each; padding is in page 0, and so
        is what another chip along the mesh's `context` holds (`mask.on_chip`).
        """
        pages, indices = [], []
        chips, chip = collectives.num_chips(CONTEXT), collectives.chip(CONTEXT)
        for rectangle in self.rectangles:
            is_here_YW, index_YW = rectangle.valid_YW, rectangle.kv_position_YW
            if chips > 1:
                is_here_YW &= index_YW % chips == chip
                index_YW //= chips
            page_YW = jnp.take_along_axis(rectangle.tables[group], index_YW // page_tokens, axis=1)
            pages.append(jnp.where(is_here_YW, page_YW, 0))
            indices.append(index_YW)
        return self.pack(pages), self.pack(indices) % page_tokens


def contiguous(num_rows: int, num_tokens: int) -> Ragged:
    """Rows from position 0 without a cache: training, scoring without pages, the naive decoder."""
    position_YW = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (num_rows, num_tokens))
    slot_Y = jnp.arange(num_rows, dtype=jnp.int32)
    return Ragged((Rectangle(slot_Y, position_YW, jnp.ones(position_YW.shape, bool), ()),))


def packed(position_YW: jax.Array, valid_YW: jax.Array) -> Ragged:
    """Rows without a cache that hold whole sequences one behind the other, each from position 0 on.
    Several in a row only attention keeps apart: states and what is pooled take one.

    Args:
        position_YW: i32[Y, W], in the token's sequence; of padding as of sequences of its own.
        valid_YW: bool[Y, W].
    """
    slot_Y = jnp.arange(len(position_YW), dtype=jnp.int32)
    start_YW = jnp.arange(position_YW.shape[1], dtype=jnp.int32) - position_YW
    return Ragged((Rectangle(slot_Y, position_YW, valid_YW, (), start_YW=start_YW),))
