"""Query heads and tokens that read the same keys, as rows of one product.

A kernel reads a page once for all G query heads of a KV head and for the query tokens of a row, or,
where a row has more of them than a tile holds, once a tile. Letters: B tiles, R rows of one, of
which the first W G are used and the rest pads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.kernels.attention.mask import Sight


class Tiling(NamedTuple):
    """How query tokens become rows, token by token and head by head."""

    width: int  # query tokens of a tile
    group: int  # G
    num_rows: int  # R

    def split(self, x_CW: jax.Array) -> jax.Array:
        """[C, W, ...] -> [B, width, ...], the last tile of a row padded with zeros."""
        padding = (0, 0), (0, -x_CW.shape[1] % self.width), *((0, 0),) * (x_CW.ndim - 2)
        return jnp.pad(x_CW, padding).reshape(-1, self.width, *x_CW.shape[2:])

    def spread(self, x_BW: jax.Array, num_rows: int | None = None) -> jax.Array:
        """A token's value for each of its rows, [B, R] or with as many rows as asked for."""
        return _padded(jnp.repeat(x_BW, self.group, axis=1), 1, num_rows or self.num_rows)

    def pack(self, q_CWNH: jax.Array) -> jax.Array:
        """[C, W, N, H] -> [B, K, R, H]."""
        C, W, N, H = q_CWNH.shape
        K, G = N // self.group, self.group
        q_BKWGH = self.split(q_CWNH.reshape(C, W, K, G, H)).swapaxes(1, 2)
        return _padded(q_BKWGH.reshape(-1, K, self.width * G, H), 2, self.num_rows)

    def sinks(self, sinks_N: jax.Array) -> jax.Array:
        """A head's value for each of its rows, [K, R]."""
        sinks_KR = jnp.tile(sinks_N.reshape(-1, self.group), self.width)
        return _padded(sinks_KR, 1, self.num_rows)

    def unpack(self, out_BKRH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """[B, K, R, H] -> [C, W, N, H], the given shape."""
        C, W, N, H = shape
        out_BKRH = out_BKRH[:, :, : self.width * self.group]
        out_BKWGH = out_BKRH.reshape(*out_BKRH.shape[:2], self.width, self.group, H)
        return out_BKWGH.swapaxes(1, 2).reshape(C, -1, N, H)[:, :W]


def seen_pages(
    sight_BW: Sight, valid_BW: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Table columns with a key that a valid token of a tile sees, from and up to: i32[B] each."""
    stop_B = jnp.where(valid_BW, sight_BW.last_CW // page_tokens + 1, 0).max(1)
    if sight_BW.first_CW is None:
        return jnp.zeros_like(stop_B), stop_B
    first_BW = jnp.where(valid_BW, sight_BW.first_CW // page_tokens, stop_B[:, None])
    return first_BW.min(1), stop_B


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding)
