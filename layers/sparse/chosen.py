"""Attention of each query over what it chose of the past, by an implementation over pages.

A choice is a page table of the query's own, oldest entries first, of whole pages or of single
tokens (pages of one token in another view): what is read is read in place and in its order, so a
query that chooses all that it sees gets what it would get without a choice.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS
from layers.backends import backends
from layers.kernels.attention.mask import mask_bounds
from layers.ragged import Rectangle


def num_visible(rectangle: Rectangle) -> jax.Array:
    """How many tokens each query of the rectangle may see, i32[Y, W]."""
    return jnp.where(rectangle.valid_YW, mask_bounds(rectangle, None).last_YW + 1, 0)


def longest(rectangle: Rectangle) -> jax.Array:
    """Most tokens that a query of the rectangle may see, i32."""
    return jnp.max(num_visible(rectangle))


def best(
    scores_YWX: jax.Array, open_YWX: jax.Array, max_chosen: int
) -> tuple[jax.Array, jax.Array]:
    """The indices of the largest scores among those that are open to a query, in rising order and
    of equals the first, i32 [..., most]; and how many they are, i32 [...]. What is behind them is
    an index past the end.
    """
    return _best_of(max_chosen)(scores_YWX, open_YWX)


@functools.cache  # one function for all layers
def _best_of(max_chosen: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    reference = functools.partial(_best, max_chosen=max_chosen)
    return backends.kernel_or(
        reference, lambda rows, scores_YWX, open_YWX: rows.choose(scores_YWX, open_YWX, max_chosen)
    )


def _best(
    scores_YWX: jax.Array, open_YWX: jax.Array, max_chosen: int
) -> tuple[jax.Array, jax.Array]:
    X = scores_YWX.shape[-1]
    scores_YWX = jnp.where(open_YWX, scores_YWX, -jnp.inf)
    _, index_YWJ = jax.lax.top_k(scores_YWX, max_chosen)
    # A caller's slice, merged into that of top_k, would hide it from XLA (`layers/topk.py`).
    index_YWJ = jax.lax.optimization_barrier(index_YWJ)
    is_open_YWJ = jnp.take_along_axis(open_YWX, index_YWJ, axis=-1)
    index_YWJ = jnp.sort(jnp.where(is_open_YWJ, index_YWJ, X), axis=-1)
    return index_YWJ, jnp.minimum(open_YWX.sum(-1, dtype=jnp.int32), max_chosen)


def entries(table_YP: jax.Array, column_YX: jax.Array, page_tokens: int) -> jax.Array:
    """Table entries of columns [Y, ...], or 0, padded to whole blocks of `page_tokens` pages."""
    num_columns, shape = table_YP.shape[1], column_YX.shape
    flat_YX = column_YX.reshape(shape[0], -1)
    page_YX = jnp.take_along_axis(table_YP, jnp.minimum(flat_YX, num_columns - 1), axis=1)
    page_YX = jnp.where(flat_YX < num_columns, page_YX, 0).reshape(shape)
    padding = -shape[-1] % max(1, BLOCK_TOKENS // page_tokens)
    return jnp.pad(page_YX, (*[(0, 0)] * (len(shape) - 1), (0, padding)))


def single_entries(table_YP: jax.Array, index_YWJ: jax.Array, page_tokens: int) -> jax.Array:
    """The table of chosen entries as pages of one each: i32 [Y, W, J], padded to whole blocks."""
    page_YWJ = entries(table_YP, index_YWJ // page_tokens, 1)
    padding = (0, 0), (0, 0), (0, page_YWJ.shape[2] - index_YWJ.shape[2])
    return page_YWJ * page_tokens + jnp.pad(index_YWJ % page_tokens, padding)


def as_single_entries(pages: jax.Array) -> jax.Array:
    """Pages [P, page tokens, ...] seen as pages of one entry each."""
    return pages.reshape(-1, 1, *pages.shape[2:])


def each_query(rectangle: Rectangle, table_YWX: jax.Array, count_YW: jax.Array) -> Rectangle:
    """The queries of a rectangle as rows of their own, which see the first `count_YW` tokens of
    their own table, [Y, W, P] or (of each KV head) [Y, W, K, P].
    """
    Y, W = count_YW.shape
    return Rectangle(
        jnp.repeat(rectangle.slot_Y, W), jnp.maximum(count_YW - 1, 0).reshape(Y * W, 1),
        rectangle.valid_YW.reshape(Y * W, 1), (table_YWX.reshape(Y * W, *table_YWX.shape[2:]),),
    )  # fmt: skip


def in_steady_tiles(
    score: Callable[..., jax.Array], deterministic: bool, *queries_YWX: jax.Array
) -> jax.Array:  # noqa: ANN001
    """`score` of all query tokens, [Y, W, ...], by arrays [Y, tile, ...]. If `deterministic`, a
    tile has as many tokens as a product needs to sum in one order.
    """
    Y, W = queries_YWX[0].shape[:2]
    tile = MIN_DETERMINISTIC_ROWS if deterministic else W
    count = -(-W // tile)

    def tiled(x_YWX: jax.Array) -> jax.Array:
        x_YWX = jnp.pad(x_YWX, ((0, 0), (0, count * tile - W), *[(0, 0)] * (x_YWX.ndim - 2)))
        return jnp.moveaxis(x_YWX.reshape(Y, count, tile, *x_YWX.shape[2:]), 1, 0)

    tiles = tuple(map(tiled, queries_YWX))
    if count == 1:
        return score(*(x[0] for x in tiles))[:, :W]
    scores_XYW = jnp.moveaxis(jax.lax.map(lambda tile_queries: score(*tile_queries), tiles), 0, 1)
    return scores_XYW.reshape(Y, count * tile, *scores_XYW.shape[3:])[:, :W]
