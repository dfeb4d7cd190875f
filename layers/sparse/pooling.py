"""Entries of several tokens each, pooled from what these keep for them (DeepSeek-AI 2026,
DeepSeek-V4, section 2.3).

Each token keeps vectors and a gate for each of their elements. An entry is, element by element, the
sum of its tokens' vectors, weighted by the softmax of their gates: of `stride` tokens, or (where
entries overlap) of these by their second vectors and of the `stride` tokens before by their first.

An entry is written in the step that feeds its last token. Where that is rejected another is fed in
its place, and the entry written again; no query before an entry's last token sees it. So what is
read depends on a sequence's own tokens alone, and a rejected draft needs no undo.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from configs.kinds.compressed import Compressed
from configs.model import ModelConfig
from layers import norm, page_rows
from layers.backends import backends
from layers.params import Params
from layers.ragged import Rectangle
from layers.reduce import row_sum
from layers.registry import StepContext
from layers.rope import angles, rotate

# (pooled_XLZ, position_XL) -> the entries of attention and the indexer's, float32 [X, width] each.
Pool = Callable[[jax.Array, jax.Array], list[jax.Array]]


def pooled(
    parts: tuple[Params, ...],
    config: ModelConfig,
    kind: Compressed,
    pooled_XLZ: jax.Array,
    position_XL: jax.Array,
) -> list[jax.Array]:
    """Entries of X groups of tokens, those of attention and the indexer's: float32 [X, width] each.

    Args:
        parts: `pooling` of attention and of the indexer.
        pooled_XLZ: what the L tokens of each entry keep, in the order of `Compressed.parameters`.
        position_XL: i32, their positions; below 0 there is none.
    """
    entries, start, m = [], 0, kind.stride
    turns = angles(kind.rope, kind.rope_width, position_XL[:, -m], config.max_context)
    for part, width in zip(parts, kind.pooled_widths, strict=True):
        bias_LZ = jnp.tile(part["bias"].astype(jnp.float32), (kind.series, 1))
        both = []
        for add in (0, bias_LZ):
            stop = start + kind.series * width
            x_XLZ = pooled_XLZ[..., start:stop].astype(jnp.float32) + add
            start = stop
            if kind.overlaps:
                x_XLZ = jnp.concatenate([x_XLZ[:, :m, :width], x_XLZ[:, m:, width:]], axis=1)
            both.append(x_XLZ)
        is_token_XL1 = (position_XL >= 0)[..., None]
        x_XLZ = jnp.where(is_token_XL1, both[0], 0)
        gate_XLZ = jnp.where(is_token_XL1, both[1], -jnp.inf)
        weight_XZL = jnp.exp(gate_XLZ - gate_XLZ.max(1, keepdims=True)).swapaxes(1, 2)
        total_XZ = row_sum(weight_XZL * x_XLZ.swapaxes(1, 2))[..., 0]
        entry_XZ = total_XZ / row_sum(weight_XZL)[..., 0]
        entry_XZ = norm.rms_norm(entry_XZ, part["norm"], kind.norm_eps, config.norm_offset)
        entries.append(turned(entry_XZ[:, None], turns, kind.rope.neighbours)[:, 0])
    return entries


def one_by_one(pool: Pool, pooled_XLZ: jax.Array, position_XL: jax.Array) -> list[jax.Array]:
    """`pool` of each entry alone, so that its bits do not depend on how many there are: XLA's CPU
    backend computes exponentials of short rows in one way or another.
    """

    def pool_entry(entry: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        pooled_LZ, position_L = entry
        return [entry_1Z[0] for entry_1Z in pool(pooled_LZ[None], position_L[None])]

    return jax.lax.map(pool_entry, (pooled_XLZ, position_XL))


def turned(x_TNH: jax.Array, turns: tuple[jax.Array, jax.Array], neighbours: bool) -> jax.Array:
    """Heads whose last elements rotate, by the angles of `rope.angles`: float32 [T, N, H]."""
    unrotated = x_TNH.shape[-1] - 2 * turns[0].shape[-1]
    rotated_TNR = rotate(x_TNH[..., unrotated:], *turns, neighbours)
    return jnp.concatenate([x_TNH[..., :unrotated], rotated_TNR], axis=-1)


def written(
    pages: Sequence[jax.Array],
    pooled_rows: jax.Array,
    rectangle: Rectangle,
    pool: Pool,
    config: ModelConfig,
    kind: Compressed,
    context: StepContext,
) -> list[jax.Array]:
    """Pages of entries with those whose last token is in a rectangle: `pages` are of attention's
    entries, and of the indexer's, [P, page tokens / stride, width]; `pooled_rows` what tokens keep
    for entries, [P, page tokens, Z], with this step's; `pool` is `pooled` of the layer.
    """
    m, L, dtype = kind.stride, kind.pooled_tokens, config.cache_dtype
    own_part, beside = context.spec.parts
    formats = own_part.page_format(dtype), own_part.index_format(dtype)
    (Y, W), page_tokens = rectangle.position_YW.shape, pooled_rows.shape[1]
    groups = context.group, context.group_beside
    entry_tables, token_tables = (rectangle.tables[group] for group in groups)
    nth_E = jnp.arange(-(-W // m), dtype=jnp.int32)
    entry_YE = rectangle.position_YW[:, :1] // m + nth_E
    newest_Y1 = jnp.max(
        jnp.where(rectangle.valid_YW, rectangle.position_YW, -1), axis=1, keepdims=True
    )
    is_whole_YE = (entry_YE + 1) * m - 1 <= newest_Y1
    position_YEL = (entry_YE + 1)[..., None] * m - L + jnp.arange(L, dtype=jnp.int32)

    def pool_entries() -> list[jax.Array]:
        at_YX = jnp.where(is_whole_YE[..., None], position_YEL, 0).reshape(Y, -1)
        at_YX = jnp.maximum(at_YX, 0)
        page_YX = jnp.take_along_axis(token_tables, at_YX // page_tokens, axis=1)
        rows = pooled_rows.at[page_YX, at_YX % page_tokens].get(mode="promise_in_bounds")
        pooled_YXZ = page_rows.numbers(rows, beside.pooled_format(dtype), config.dtype)
        return pool(pooled_YXZ.reshape(-1, L, beside.pooled_width), position_YEL.reshape(-1, L))

    def nothing() -> list[jax.Array]:
        shapes = jax.eval_shape(pool_entries)
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    # Most steps of few tokens end no entry, and would pool for nothing.
    entries = backends.current().where_needed(is_whole_YE.any, pool_entries, nothing)
    span = page_tokens // m
    column_YE = jnp.minimum(entry_YE // span, entry_tables.shape[1] - 1)
    page_YE = jnp.take_along_axis(entry_tables, column_YE, axis=1)
    at = jnp.where(is_whole_YE, page_YE, 0).ravel(), (entry_YE % span).ravel()
    rows = [
        page_rows.as_stored(entry_XZ.astype(config.dtype), format)
        for entry_XZ, format in zip(entries, formats, strict=False)  # an indexer's, if there is one
    ]
    return [
        old.at[at].set(page_rows.encode(row_XZ, old), mode="promise_in_bounds")
        for old, row_XZ in zip(pages, rows, strict=True)
    ]
