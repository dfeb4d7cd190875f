"""Quest (Tang et al. 2024, arXiv 2406.10774): each query reads the pages whose keys may score
highest, for each KV head its own.

Of a full page the smallest and the largest of each of its keys' elements are kept. The largest
score that any key between them could have bounds what the page's keys have. The heads of a group
read one choice, by the sum of their bounds. The first page is always read, and so is the query's
own, whose extremes nobody looks at: which pages are full is a matter of the query's position, so a
token does not depend on how many tokens were fed with it, and what a page holds of former owners or
of refused drafts is written over before it counts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS, PageFormat
from layers import page_rows
from layers.backends import backends
from layers.kernels.attention import reference
from layers.kernels.attention.contract import Implementation, Options
from layers.kv_cache import Indexed
from layers.ragged import Ragged, Rectangle
from layers.sparse.chosen import best, each_query, entries, in_steady_tiles, longest

_PAGES = 128  # that are scored at a time


def summarized(leaf: Indexed, ragged: Ragged, group: int, page_format: PageFormat) -> Indexed:
    """The leaf with the extremes of the pages that this step has written to."""
    index, page_tokens = leaf.index, leaf.page_tokens
    for rectangle in ragged.rectangles:
        valid_YW, table_YP = rectangle.valid_YW, rectangle.tables[group]
        max_written = -(-(valid_YW.shape[1] - 1) // page_tokens) + 1
        first_Y1 = rectangle.position_YW[:, :1] // page_tokens
        last_Y = jnp.max(jnp.where(valid_YW, rectangle.position_YW, -1), axis=1)
        column_YX = first_Y1 + jnp.arange(max_written, dtype=jnp.int32)
        is_written_YX = column_YX <= (last_Y // page_tokens)[:, None]
        column_YX = jnp.where(is_written_YX, column_YX, table_YP.shape[1])
        page_X = entries(table_YP, column_YX, BLOCK_TOKENS).ravel()
        stored_XSH = leaf.pages.at[page_X, :, page_format.keys].get(mode="promise_in_bounds")
        keys_XSH = page_rows.decode(stored_XSH)
        extremes_X2H = jnp.stack([keys_XSH.min(1), keys_XSH.max(1)], axis=1)
        stored_X2H = page_rows.encode(extremes_X2H, index)
        index = index.at[page_X].set(stored_X2H, mode="promise_in_bounds")
    return dataclasses.replace(leaf, index=index)


def attend(
    implementation: Implementation,
    q_YWNH: jax.Array,
    leaf: Indexed,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options,
    token_budget: int,
) -> jax.Array:
    """`contract.AttendPages` of at most `token_budget` tokens in whole pages, two at least."""
    table_YP, page_tokens = rectangle.tables[group], leaf.page_tokens
    max_pages = max(2, token_budget // page_tokens)
    attend_pages = implementation.attend_pages
    page_bounds = implementation.page_bounds or _page_bounds

    def read_all() -> jax.Array:
        return attend_pages(q_YWNH, leaf.pages, rectangle, group, page_format, options)

    def read_best() -> jax.Array:
        open_YW1 = (rectangle.position_YW // page_tokens)[:, :, None]
        full_Y = jnp.max(jnp.where(rectangle.valid_YW, open_YW1[:, :, 0], 0), axis=1)
        bounds_YWKP = page_bounds(q_YWNH, leaf.index, table_YP, full_Y, page_format, options)
        column_P = jnp.arange(table_YP.shape[1], dtype=jnp.int32)
        is_always_YWP = (column_P == 0) | (column_P == open_YW1)
        bounds_YWKP = jnp.where(is_always_YWP[:, :, None], jnp.inf, bounds_YWKP)
        is_there_YWP = jnp.broadcast_to(column_P <= open_YW1, is_always_YWP.shape)
        is_there_YWKP = jnp.broadcast_to(is_there_YWP[:, :, None], bounds_YWKP.shape)
        column_YWKJ, count_YWK = best(bounds_YWKP, is_there_YWKP, max_pages)
        # The query's own page is the last one: of what was chosen it sees the beginning.
        offset_YW = rectangle.position_YW % page_tokens
        count_YW = (count_YWK[:, :, 0] - 1) * page_tokens + offset_YW + 1
        table_YWKJ = entries(table_YP, column_YWKJ, page_tokens)
        rows = each_query(rectangle, table_YWKJ, count_YW)
        q_Q1NH = q_YWNH.reshape(-1, 1, *q_YWNH.shape[2:])
        out_Q1NH = attend_pages(q_Q1NH, leaf.pages, rows, 0, page_format, options)
        return out_Q1NH.reshape(*q_YWNH.shape[:3], -1)

    if table_YP.shape[1] <= max_pages:
        return read_all()
    # The same bits, where no query sees more pages than it may read: there is nothing to choose.
    return backends.current().where_needed(
        lambda: longest(rectangle) > max_pages * page_tokens, read_best, read_all
    )


def _page_bounds(
    q_YWNH: jax.Array,
    extremes: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    page_format: PageFormat,
    options: Options,
) -> jax.Array:
    """`contract.PageBounds` by XLA's products, where NaN of one head is all heads'.

    An element's product is largest with the largest key where the query is positive, else with the
    smallest: a product of (q where q > 0, q where q < 0) and (largest, smallest).
    """
    Y, W, N, H = q_YWNH.shape
    K, num_columns = page_format.kv_heads, table_YP.shape[1]
    width = min(_PAGES, num_columns)
    table_YP = jnp.pad(table_YP, ((0, 0), (0, -num_columns % width)))
    q_YWKGH = q_YWNH.astype(jnp.float32).reshape(Y, W, K, N // K, H)
    signed = jnp.minimum(q_YWKGH, 0), jnp.maximum(q_YWKGH, 0)
    # One head after another: a sum's order may depend on the size of the array.
    both_YWK2H = jnp.stack([sum(x[:, :, :, g] for g in range(N // K)) for x in signed], axis=3)
    # In their own head's columns, so that extremes are used as they lie.
    is_same_head_K1K1 = jnp.eye(K, dtype=bool)[:, None, :, None]
    both_YWK2KH = jnp.where(is_same_head_K1K1, both_YWK2H[:, :, :, :, None], 0).astype(q_YWNH.dtype)

    def block(j: jax.Array, bounds_YWKP: jax.Array) -> jax.Array:
        ids_YP = jax.lax.dynamic_slice_in_dim(table_YP, j * width, width, axis=1)
        block_YPX = extremes.at[ids_YP].get(mode="promise_in_bounds")
        extremes_YPX = page_rows.decode(block_YPX).reshape(Y, width, 2 * K * H)

        def score(both_YWK2KH: jax.Array) -> jax.Array:
            both_YUX = both_YWK2KH.reshape(Y, -1, 2 * K * H)
            return reference.dot(both_YUX, extremes_YPX, 2).reshape(Y, -1, K, width)

        block_YWKP = in_steady_tiles(score, options.deterministic, both_YWK2KH)
        return jax.lax.dynamic_update_slice_in_dim(bounds_YWKP, block_YWKP, j * width, axis=3)

    empty = jnp.zeros((Y, W, K, table_YP.shape[1]), jnp.float32)
    stop = (jnp.max(count_Y) + width - 1) // width
    return jax.lax.fori_loop(0, stop, block, empty)[..., :num_columns]
