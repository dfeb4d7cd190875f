"""Compressed attention (DeepSeek-AI 2026, DeepSeek-V4, section 2.3): one softmax over the newest
tokens, one by one, and over entries of several tokens each of all the past, all of them or those
that an indexer chooses.

What all heads read of a token, or of an entry, is key and value at once, and is rotated as keys
are. What a query finds is a sum of values that are rotated by their positions, so it is turned back
by the query's: then it depends on distances alone.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS
from configs.kinds.compressed import Compressed
from configs.model import ModelConfig
from layers import norm, page_rows
from layers.backends import backends
from layers.kernels.attention import api, reference
from layers.kernels.attention.contract import Options, Stretch
from layers.kernels.attention.mask import MaskBounds, mask_bounds, visible
from layers.kv_cache import Indexed, Pooled
from layers.linear import each_linear, linear, project_out
from layers.mixers import attention, indexer
from layers.params import Params
from layers.ragged import Rectangle
from layers.registry import Leaf, StepContext
from layers.sparse import chosen, pooling
from layers.sparse.pooling import turned


class Projected(NamedTuple):
    """What attention computes with, of tokens packed or in rows."""

    q_TNH: jax.Array  # scaled and rotated
    k_TH: jax.Array  # rotated; the value, too
    pooled_TZ: jax.Array  # what entries are pooled from
    q_TIX: jax.Array  # of the indexer, I heads of width X; [T, 0, 0] where there is none
    weights_TI: jax.Array  # float32, of its heads


def apply(
    params: Params,
    config: ModelConfig,
    kind: Compressed,
    x_TD: jax.Array,
    leaf: Leaf,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """One layer: float32 [T, D], and the leaf with the step's tokens: `Pooled`, or that of
    `attention.attend` where there are no entries.
    """
    assert context.angles is not None
    ragged = context.ragged
    with jax.named_scope("qkv"):
        projected = _project(params, config, kind, x_TD, context)
    options = Options(sinks_N=params["sinks"], deterministic=context.deterministic)
    if not kind.stride:
        k_T1H = projected.k_TH[:, None]
        behind = (0, 0), (0, 0), (0, kind.rope_width)  # where the cache notes what is not finite
        with jax.named_scope("attend"):
            out_TNH, leaf = attention.attend(
                jnp.pad(projected.q_TNH, behind), jnp.pad(k_T1H, behind), k_T1H, leaf, context,
                sinks_N=params["sinks"],
            )  # fmt: skip
        return _out(out_TNH, params, config, kind, context), leaf
    parts = (params["pooling"],) + ((params["indexer"]["pooling"],) if kind.indexer else ())
    assert leaf is None or isinstance(leaf, Pooled)
    pool = functools.partial(pooling.pooled, parts, config, kind)
    if context.deterministic:
        pool = functools.partial(pooling.one_by_one, pool)
    rows = zip(*map(ragged.split, projected), strict=True)
    if leaf is None:
        attend = functools.partial(_attend_dense, pool=pool, kind=kind, options=options)
    else:
        with jax.named_scope("pool"):
            leaf = _written(projected, leaf, pool, config, kind, context)
        attend = functools.partial(_attend, leaf=leaf, kind=kind, options=options, context=context)
    with jax.named_scope("attend"):
        outs = [
            attend(Projected(*row), rectangle)
            for row, rectangle in zip(rows, ragged.rectangles, strict=True)
        ]
    return _out(ragged.pack(outs), params, config, kind, context), leaf


def _out(
    out_TNH: jax.Array, params: Params, config: ModelConfig, kind: Compressed, context: StepContext
) -> jax.Array:
    T = len(out_TNH)
    with jax.named_scope("out"):
        out_TNH = _turned_back(out_TNH, kind, context).astype(config.dtype)
        out_TGX = each_linear(out_TNH.reshape(T, kind.groups, -1), params["group_out"])
    return project_out(out_TGX.reshape(T, -1), params, config.dtype)


def _project(
    params: Params, config: ModelConfig, kind: Compressed, x_TD: jax.Array, context: StepContext
) -> Projected:
    assert context.angles is not None
    T, H, eps, is_paired = x_TD.shape[0], kind.head_width, kind.norm_eps, kind.rope.neighbours
    down_TX = norm.rms_norm(
        linear(x_TD, params["q_down"]), params["q_norm"], eps, config.norm_offset
    )
    q_TNH = linear(down_TX, params["q_up"]).reshape(T, kind.num_heads, H)
    q_TNH = turned(norm.rms_norm(q_TNH, jnp.ones(H), eps), context.angles, is_paired)
    k_TH = norm.rms_norm(linear(x_TD, params["kv"]), params["kv_norm"], eps, config.norm_offset)
    k_TH = turned(k_TH[:, None], context.angles, is_paired)[:, 0]
    indexer, q_TIX, weights_TI = kind.indexer, jnp.zeros((T, 0, 0)), jnp.zeros((T, 0))
    pooled_TZ = linear(x_TD, params["pooled"]) if kind.stride else jnp.zeros((T, 0))
    if indexer is not None:
        names = params["indexer"]
        pooled_TZ = jnp.concatenate([pooled_TZ, linear(x_TD, names["pooled"])], axis=1)
        q_TIX = linear(down_TX, names["q"]).reshape(T, indexer.num_heads, indexer.head_width)
        q_TIX = turned(q_TIX, context.angles, is_paired)
        scale = (indexer.head_width * indexer.num_heads) ** -0.5
        weights_TI = linear(x_TD, names["weights"]) * scale
    return Projected(
        (q_TNH * H**-0.5).astype(config.dtype), k_TH.astype(config.dtype),
        pooled_TZ.astype(config.dtype), q_TIX.astype(config.dtype), weights_TI,
    )  # fmt: skip


def _turned_back(x_TNH: jax.Array, kind: Compressed, context: StepContext) -> jax.Array:
    """What queries found, without their rotation and in the order that neighbours had before it."""
    assert context.angles is not None
    cos_TX, sin_TX = context.angles
    x_TNH = turned(x_TNH, (cos_TX, -sin_TX), False)
    if not kind.rope.neighbours:
        return x_TNH
    unrotated = x_TNH.shape[-1] - 2 * cos_TX.shape[-1]
    halves = jnp.split(x_TNH[..., unrotated:], 2, axis=-1)
    pairs_TNR = jnp.stack(halves, axis=-1).reshape(*x_TNH.shape[:2], -1)
    return jnp.concatenate([x_TNH[..., :unrotated], pairs_TNR], axis=-1)


def _written(
    projected: Projected,
    leaf: Pooled,
    pool: pooling.Pool,
    config: ModelConfig,
    kind: Compressed,
    context: StepContext,
) -> Pooled:
    ragged, group = context.ragged, context.group_beside
    _, beside = context.spec.parts
    formats = beside.page_format(config.cache_dtype), beside.pooled_format(config.cache_dtype)
    tokens = Indexed(*(
        page_rows.write(pages, page_rows.as_stored(row_TX, format), ragged, group)
        for pages, row_TX, format in zip(
            (leaf.tokens.pages, leaf.tokens.index), (projected.k_TH, projected.pooled_TZ), formats,
            strict=True,
        )
    ))  # fmt: skip
    pages, tree = jax.tree.flatten(leaf.entries)
    for rectangle in ragged.rectangles:
        pages = pooling.written(pages, tokens.index, rectangle, pool, config, kind, context)
    return Pooled(jax.tree.unflatten(tree, pages), tokens)


def _attend(
    projected: Projected,
    rectangle: Rectangle,
    leaf: Pooled,
    kind: Compressed,
    options: Options,
    context: StepContext,
) -> jax.Array:
    page_format = context.page_format
    assert page_format is not None
    pages = leaf.entries.pages
    span, table_YP = pages.shape[1], rectangle.tables[context.group]
    attend_stretches = api.implementation(context.attention).attend_stretches
    attend_stretches = attend_stretches or reference.attend_stretches
    table_YP = jnp.pad(table_YP, ((0, 0), (0, -table_YP.shape[1] % (BLOCK_TOKENS // span))))
    last_YW = _last_entry(rectangle, kind)
    token_table_YP, near = _near(
        rectangle, context.group_beside, kind.window, leaf.tokens.pages.shape[1]
    )

    def read_all() -> jax.Array:
        stretches = (
            Stretch(leaf.tokens.pages, token_table_YP, near),
            Stretch(pages, table_YP, MaskBounds(last_YW)),
        )
        return attend_stretches(
            projected.q_TNH, stretches, rectangle.valid_YW, page_format, options
        )

    if kind.indexer is None or table_YP.shape[1] * span <= kind.indexer.top_k:
        return read_all()
    top_k = kind.indexer.top_k
    count_Y = jnp.max(jnp.where(rectangle.valid_YW, last_YW + 1, 0), axis=1)

    def read_best() -> jax.Array:
        assert isinstance(leaf.entries, Indexed)
        Y, W = last_YW.shape
        scores_YWS = indexer.scores(
            projected.q_TIX, projected.weights_TI, leaf.entries.index, table_YP, count_Y, context
        )
        open_YWS = jnp.arange(scores_YWS.shape[2]) <= last_YW[..., None]
        entry_YWJ, count_YW = chosen.best(scores_YWS, open_YWS, top_k)
        table_YWJ = chosen.single_entries(table_YP, entry_YWJ, span)
        queries = [x.reshape(Y * W, 1, *x.shape[2:]) for x in (projected.q_TNH, rectangle.valid_YW)]
        stretches = (
            Stretch(
                leaf.tokens.pages, jnp.repeat(token_table_YP, W, axis=0),
                jax.tree.map(lambda x_YW: x_YW.reshape(-1, 1), near),
            ),
            Stretch(
                chosen.as_single_entries(pages), table_YWJ.reshape(Y * W, -1),
                MaskBounds(count_YW.reshape(-1, 1) - 1),
            ),
        )  # fmt: skip
        out = attend_stretches(queries[0], stretches, queries[1], page_format, options)
        return out.reshape(projected.q_TNH.shape)

    # The same bits, where no query sees more than it may read: there is nothing to choose.
    return backends.current().where_needed(lambda: jnp.max(count_Y) > top_k, read_best, read_all)


def _near(
    rectangle: Rectangle, group: int, window: int, page_tokens: int
) -> tuple[jax.Array, MaskBounds]:
    """A table [Y, P] of the blocks in each row's windows, and its queries' bounds within it: else a
    short row would have all rows read from where its window begins.
    """
    W = rectangle.position_YW.shape[1]
    near = mask_bounds(rectangle, window)
    assert near.first_YW is not None
    block_Y1 = near.first_YW[:, :1] // BLOCK_TOKENS
    columns = BLOCK_TOKENS // page_tokens
    num_blocks = -(-(window + W - 2) // BLOCK_TOKENS) + 1
    column_YP = block_Y1 * columns + jnp.arange(num_blocks * columns, dtype=jnp.int32)
    table_YP = chosen.entries(rectangle.tables[group], column_YP, page_tokens)
    return table_YP, jax.tree.map(
        lambda x_YW: jnp.minimum(x_YW - block_Y1 * BLOCK_TOKENS, num_blocks * BLOCK_TOKENS - 1),
        near,
    )


def _last_entry(rectangle: Rectangle, kind: Compressed) -> jax.Array:
    """The last entry that each query sees, -1 for none: i32 [Y, W]."""
    return (rectangle.position_YW + 1) // kind.stride - 1


def _attend_dense(
    projected: Projected,
    rectangle: Rectangle,
    pool: pooling.Pool,
    kind: Compressed,
    options: Options,
) -> jax.Array:
    """Of rows that begin at position 0, without a cache: float32 [Y, W, N, H]."""
    Y, W = rectangle.position_YW.shape
    m, L, count = kind.stride, kind.pooled_tokens, W // kind.stride
    visible_YWS = visible(
        rectangle.kv_position_YW[:, None, :],
        *jax.tree.map(lambda x_YW: x_YW[:, :, None], mask_bounds(rectangle, kind.window)),
    )
    keys_YSH = projected.k_TH
    if count:
        position_EL = jnp.arange(count)[:, None] * m + m - L + jnp.arange(L)
        pooled_YELZ = projected.pooled_TZ[:, jnp.maximum(position_EL, 0)]
        pooled_XLZ = pooled_YELZ.reshape(Y * count, L, -1)
        entries, *keys = pool(pooled_XLZ, jnp.tile(position_EL, (Y, 1)))
        last_YW1 = _last_entry(rectangle, kind)[..., None]
        open_YWE = jnp.arange(count) <= last_YW1
        if kind.indexer is not None and count > kind.indexer.top_k:
            k_YEX = keys[0].reshape(Y, count, -1).astype(projected.q_TIX.dtype)
            open_YWE &= indexer.chosen_dense(
                projected.q_TIX, projected.weights_TI, k_YEX, open_YWE, kind.indexer.top_k
            )
        entries_YEH = entries.reshape(Y, count, -1).astype(keys_YSH.dtype)
        keys_YSH = jnp.concatenate([keys_YSH, entries_YEH], axis=1)
        visible_YWS = jnp.concatenate([visible_YWS, open_YWE], axis=2)
    k_YSKH = keys_YSH[:, :, None]
    return reference.attend_masked(projected.q_TNH, k_YSKH, k_YSKH, visible_YWS, options)
