"""The lightning indexer (DeepSeek-AI 2025, DeepSeek-V3.2): small heads score every token for a
query, and attention reads the best ones.

A token's score is the sum over heads of weight x relu(q.k), where the weights are the query's and
the key is one for all heads. DeepSeek rotates both by a Hadamard matrix before it quantizes them,
which changes no product; here they are not quantized.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS, PageFormat
from configs.kinds.latent import Indexer, Latent
from configs.model import ModelConfig
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS
from layers import norm, page_rows
from layers.backends import backends
from layers.kernels.attention import api, reference
from layers.kernels.attention.contract import Options
from layers.kernels.attention.mask import mask_bounds, visible
from layers.kv_cache import Indexed, Paged
from layers.linear import linear
from layers.mixers.attention import packed_row
from layers.params import Params
from layers.ragged import Rectangle
from layers.registry import Chosen, Leaf, StepContext
from layers.rope import rotate
from layers.sparse import chosen

# Blocks that are scored at once: a trip of the loop takes as long as scores of few queries.
_MOST_BLOCKS, _MOST_PRODUCTS = 8, 1 << 22
Choice = tuple[jax.Array, jax.Array]  # of `chosen.best`


class Index(NamedTuple):
    """What tokens are scored with; I are the indexer's heads, and X is their width."""

    q_TIX: jax.Array
    weights_TI: jax.Array  # float32, with the factor on q.k
    k_TX: jax.Array


def project(
    params: Params,
    config: ModelConfig,
    kind: Latent,
    x_TD: jax.Array,
    queries_TX: jax.Array,
    context: StepContext,
) -> Index:
    """Projects the indexer's queries from `queries_TX`, and its keys and weights from tokens."""
    index = kind.indexer
    assert index is not None and context.angles is not None
    T, X = x_TD.shape[0], index.head_width
    q_TIX = rotate(
        linear(queries_TX, params["q"]).reshape(T, index.num_heads, X),
        *context.angles,
        index.neighbours,
    )
    both_TX = linear(x_TD, params["k"])
    names = params["k_norm"]
    k_TX = norm.layer_norm(both_TX[:, :X], names["weight"], names["bias"], kind.norm_eps)
    k_TX = rotate(k_TX[:, None], *context.angles, index.neighbours)[:, 0]
    weights_TI = both_TX[:, X:] * (X * index.num_heads) ** -0.5
    return Index(q_TIX.astype(config.dtype), weights_TI, k_TX.astype(config.dtype))


def attend(
    index: Index | None,
    indexer: Indexer,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    leaf: Leaf | Chosen,
    context: StepContext,
) -> tuple[jax.Array, Leaf | Chosen]:
    """`attention.attend` over chosen tokens; a query that sees up to `indexer.top_k` reads all.

    Args:
        index: what tokens are scored with; None: `leaf` brings an earlier layer's choice.
    """
    ragged, options = context.ragged, Options(deterministic=context.deterministic)
    choices: tuple[Any, ...] = (None,) * len(ragged.rectangles)
    if isinstance(leaf, Chosen):
        leaf, choices = leaf
    indexes: list[Index | None] = [None] * len(ragged.rectangles)
    if index is not None:
        indexes = [Index(*rows) for rows in zip(*map(ragged.split, index), strict=True)]
    if leaf is None:
        choices = tuple(
            choice if rows is None else _chosen_dense(rows, indexer, rectangle)
            for rows, choice, rectangle in zip(indexes, choices, ragged.rectangles, strict=True)
        )
        parts = map(ragged.split, (q_TNH, k_TKH, v_TKH))
        outs = [
            reference.attend_dense(q, k, v, rectangle, options, choice)
            for q, k, v, choice, rectangle in zip(*parts, choices, ragged.rectangles, strict=True)
        ]
        return ragged.pack(outs), Chosen(None, choices) if context.is_choice_owner else None
    assert context.page_format is not None and isinstance(leaf, Paged)
    row_TX = packed_row(k_TKH, v_TKH, context.page_format.values_in_keys)
    row_TX = page_rows.as_stored(row_TX, context.page_format)
    write = api.implementation(context.attention).write
    leaf = leaf.with_pages(write(leaf.pages, row_TX, ragged, context.group))
    if index is not None:
        assert isinstance(leaf, Indexed)
        index_format = context.spec.index_format(context.page_format.dtype)
        index_TX = page_rows.as_stored(index.k_TX, index_format)
        keys = page_rows.write(leaf.index, index_TX, ragged, context.group)
        leaf = dataclasses.replace(leaf, index=keys)
    outs, row_choices = [], []
    rows = zip(ragged.split(q_TNH), indexes, choices, ragged.rectangles, strict=True)
    for q_YWNH, index_rows, choice, rectangle in rows:
        choose: Callable[[], Choice] | None = None
        if choice is not None:
            choose = functools.partial(lambda earlier: earlier, choice)
        if index_rows is not None:
            assert isinstance(leaf, Indexed)
            choose = functools.partial(_choose, index_rows, rectangle, leaf, indexer, context)
        out_YWNH, row_choice = _attend(q_YWNH, rectangle, leaf, indexer, context, choose)
        outs.append(out_YWNH)
        row_choices.append(row_choice)
    return ragged.pack(outs), Chosen(leaf, tuple(row_choices)) if context.is_choice_owner else leaf


def _choose(
    index: Index, rectangle: Rectangle, leaf: Indexed, indexer: Indexer, context: StepContext
) -> Choice:
    """The positions that each query reads, rising, [Y, W, J], and how many they are, [Y, W]."""
    table_YP, count_Y = rectangle.tables[context.group], jnp.max(chosen.num_visible(rectangle), 1)
    scores_YWS = scores(index.q_TIX, index.weights_TI, leaf.index, table_YP, count_Y, context)
    visible_YWS = _visible(jnp.arange(scores_YWS.shape[2], dtype=jnp.int32), rectangle)
    return chosen.best(scores_YWS, visible_YWS, indexer.top_k)


def _attend(
    q_YWNH: jax.Array,
    rectangle: Rectangle,
    leaf: Paged,
    indexer: Indexer,
    context: StepContext,
    choose: Callable[[], Choice] | None,
) -> tuple[jax.Array, Choice | None]:
    """Attention, and the choice if later layers read it; without `choose` queries read all."""
    group, page_format, top_k = context.group, context.page_format, indexer.top_k
    attend_pages = api.implementation(context.attention).attend_pages
    assert page_format is not None
    options = Options(deterministic=context.deterministic)
    table_YP, page_tokens = rectangle.tables[group], leaf.page_tokens

    def read_all() -> jax.Array:
        return attend_pages(q_YWNH, leaf.pages, rectangle, group, page_format, options)

    def read_best(position_YWJ: jax.Array, count_YW: jax.Array) -> jax.Array:
        table_YWJ = chosen.single_entries(table_YP, position_YWJ, page_tokens)
        rows = chosen.each_query(rectangle, table_YWJ, count_YW)
        pages_of_one = jax.tree.map(chosen.as_single_entries, leaf.pages)
        q_Q1NH = q_YWNH.reshape(-1, 1, *q_YWNH.shape[2:])
        out_Q1NX = attend_pages(q_Q1NH, pages_of_one, rows, 0, page_format, options)
        return out_Q1NX.reshape(*q_YWNH.shape[:3], -1)

    if choose is None or table_YP.shape[1] * page_tokens <= top_k:
        return read_all(), None

    def read_chosen() -> tuple[jax.Array, Choice | None]:
        choice = choose()
        return read_best(*choice), choice if context.is_choice_owner else None

    def read_all_of_them() -> tuple[jax.Array, Choice | None]:
        if not context.is_choice_owner:
            return read_all(), None
        shapes = jax.eval_shape(choose)
        return read_all(), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # The same bits, where no query sees more than it may read: there is nothing to choose.
    return backends.current().where_needed(
        lambda: chosen.longest(rectangle) > top_k, read_chosen, read_all_of_them
    )


def _visible(position: jax.Array, rectangle: Rectangle) -> jax.Array:
    """Whether each query sees the KV positions [S], or [Y, 1, S]: bool [Y, W, S]."""
    bounds = jax.tree.map(lambda x_YW: x_YW[:, :, None], mask_bounds(rectangle, None))
    return visible(position, *bounds)


def _chosen_dense(index: Index, indexer: Indexer, rectangle: Rectangle) -> jax.Array:
    """Which of a rectangle's tokens each of its queries reads: bool [Y, W, S = W]."""
    Y, W = index.weights_TI.shape[:2]
    if indexer.top_k >= W:
        return jnp.ones((Y, W, W), bool)
    visible_YWS = _visible(rectangle.kv_position_YW[:, None, :], rectangle)
    return chosen_dense(*index, visible_YWS, indexer.top_k)


def chosen_dense(
    q_YWIX: jax.Array, weights_YWI: jax.Array, k_YSX: jax.Array, visible_YWS: jax.Array, top_k: int
) -> jax.Array:
    """Which of the keys that each query sees it reads, without a cache: bool [Y, W, S]."""
    q_YWIX, weights_YWI, k_YSX = jax.lax.stop_gradient((q_YWIX, weights_YWI, k_YSX))
    (Y, W), S = weights_YWI.shape[:2], k_YSX.shape[1]

    def add(scores_YWS: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q_YWX, weights_YW = head
        products_YWS = jax.nn.relu(reference.dot(q_YWX, k_YSX, 2))
        return scores_YWS + weights_YW[:, :, None] * products_YWS, None

    heads = jnp.moveaxis(q_YWIX, 2, 0), jnp.moveaxis(weights_YWI, 2, 0)
    scores_YWS, _ = jax.lax.scan(add, jnp.zeros((Y, W, S), jnp.float32), heads)
    index_YWJ, _ = chosen.best(scores_YWS, visible_YWS, top_k)
    y, w = jnp.arange(Y)[:, None, None], jnp.arange(W)[None, :, None]
    return jnp.zeros((Y, W, S), bool).at[y, w, index_YWJ].set(True, mode="drop")


def scores(
    q_YWIX: jax.Array,
    weights_YWI: jax.Array,
    pages: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    context: StepContext,
) -> jax.Array:
    """`contract.IndexScores` of the step's implementation of attention, or by XLA's products."""
    assert context.page_format is not None
    index_format = context.spec.index_format(context.page_format.dtype)
    options = Options(deterministic=context.deterministic)
    index_scores = api.implementation(context.attention).index_scores or _scores
    return index_scores(q_YWIX, weights_YWI, pages, table_YP, count_Y, index_format, options)


def _scores(
    q_YWIX: jax.Array,
    weights_YWI: jax.Array,
    pages: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    index_format: PageFormat,
    options: Options,
) -> jax.Array:
    """`contract.IndexScores` by XLA's products, block by block: trip counts are data."""
    deterministic = options.deterministic
    Y, W, num_heads, X = q_YWIX.shape
    page_tokens = pages.shape[1]
    times = _MOST_PRODUCTS // (Y * W * num_heads * BLOCK_TOKENS) or 1
    times = _MOST_BLOCKS if deterministic else min(1 << times.bit_length() - 1, _MOST_BLOCKS)
    block_pages = math.gcd(table_YP.shape[1], times * BLOCK_TOKENS // page_tokens)
    block_tokens = block_pages * page_tokens
    rows = MIN_DETERMINISTIC_ROWS if deterministic else 1

    def block(j: jax.Array, scores_YWS: jax.Array) -> jax.Array:
        ids_YP = jax.lax.dynamic_slice_in_dim(table_YP, j * block_pages, block_pages, axis=1)
        block_YPX = pages.at[ids_YP].get(mode="promise_in_bounds")
        k_YSX = page_rows.numbers(block_YPX, index_format, q_YWIX.dtype).reshape(Y, block_tokens, X)

        def score(q_YWIX: jax.Array, weights_YWI: jax.Array) -> jax.Array:
            products_YUS = jax.nn.relu(reference.dot(q_YWIX.reshape(Y, -1, X), k_YSX, 2))
            products_QIS = products_YUS.reshape(-1, num_heads, block_tokens)
            weights_QUI = jnp.broadcast_to(
                weights_YWI.reshape(-1, 1, num_heads), (len(products_QIS), rows, num_heads)
            )
            return reference.dot(weights_QUI, products_QIS, 1)[:, 0].reshape(Y, -1, block_tokens)

        block_YWS = chosen.in_steady_tiles(score, deterministic, q_YWIX, weights_YWI)
        return jax.lax.dynamic_update_slice_in_dim(scores_YWS, block_YWS, j * block_tokens, axis=2)

    stop = (jnp.max(count_Y) + block_tokens - 1) // block_tokens
    empty_YWS = jnp.zeros((Y, W, table_YP.shape[1] * page_tokens), jnp.float32)
    return jax.lax.fori_loop(0, stop, block, empty_YWS)
