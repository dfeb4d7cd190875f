"""Query heads and tokens that read the same keys, as rows of one product.

A kernel reads a page once for all G query heads of a KV head and for the query tokens of a row, or,
where a row has more of them than a tile holds, once a tile. Z counts tiles, U the rows of one, of
which the first W G are used and the rest pads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.kernels.attention.mask import MaskBounds


class Tiling(NamedTuple):
    """How query tokens become rows, token by token and head by head."""

    width: int  # query tokens of a tile
    group: int  # G
    num_rows: int  # U

    def split(self, x_YW: jax.Array) -> jax.Array:
        """[Y, W, ...] -> [Z, width, ...], the last tile of a row padded with zeros."""
        padding = (0, 0), (0, -x_YW.shape[1] % self.width), *((0, 0),) * (x_YW.ndim - 2)
        return jnp.pad(x_YW, padding).reshape(-1, self.width, *x_YW.shape[2:])

    def spread(self, x_ZW: jax.Array, num_rows: int | None = None) -> jax.Array:
        """A token's value for each of its rows, [Z, U] or with as many rows as asked for."""
        return _padded(jnp.repeat(x_ZW, self.group, axis=1), 1, num_rows or self.num_rows)

    def pack(self, q_YWNH: jax.Array) -> jax.Array:
        """[Y, W, N, H] -> [Z, K, U, H]."""
        Y, W, N, H = q_YWNH.shape
        K, G = N // self.group, self.group
        q_ZKWGH = self.split(q_YWNH.reshape(Y, W, K, G, H)).swapaxes(1, 2)
        return _padded(q_ZKWGH.reshape(-1, K, self.width * G, H), 2, self.num_rows)

    def sinks(self, sinks_N: jax.Array) -> jax.Array:
        """A head's value for each of its rows, [K, U]."""
        sinks_KU = jnp.tile(sinks_N.reshape(-1, self.group), self.width)
        return _padded(sinks_KU, 1, self.num_rows)

    def unpack(self, out_ZKUH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """[Z, K, U, H] -> [Y, W, N, H], the given shape."""
        Y, W, N, H = shape
        out_ZKUH = out_ZKUH[:, :, : self.width * self.group]
        out_ZKWGH = out_ZKUH.reshape(*out_ZKUH.shape[:2], self.width, self.group, H)
        return out_ZKWGH.swapaxes(1, 2).reshape(Y, -1, N, H)[:, :W]


def visible_pages(
    bounds_ZW: MaskBounds, valid_ZW: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """First table column that valid tokens see, and the one after the last: i32[Z] each."""
    stop_Z = jnp.where(valid_ZW, bounds_ZW.last_YW // page_tokens + 1, 0).max(1)
    if bounds_ZW.first_YW is None:
        return jnp.zeros_like(stop_Z), stop_Z
    first_ZW = jnp.where(valid_ZW, bounds_ZW.first_YW // page_tokens, stop_Z[:, None])
    return first_ZW.min(1), stop_Z


def page_shares(
    first_Z: jax.Array, stop_Z: jax.Array, num_splits: int
) -> tuple[jax.Array, jax.Array]:
    """First page that each split of a row reads, and the one after its last, i32[Z, X] each. Splits
    share a row's pages equally; late splits of a short row are empty.
    """
    first_Z1, stop_Z1 = first_Z[:, None], stop_Z[:, None]
    share_Z1 = -(-(stop_Z1 - first_Z1) // num_splits)
    start_ZX = first_Z1 + share_Z1 * jnp.arange(num_splits, dtype=jnp.int32)
    return jnp.minimum(start_ZX, stop_Z1), jnp.minimum(start_ZX + share_Z1, stop_Z1)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding)
