"""Attention over pages in plain jnp: the oracle of every kernel, and the CPU path.

Blocks of 128 tokens are gathered through the page table and folded into an online softmax
(Milakov & Gimelshein 2018, arXiv 1805.02867). Trip counts are data, so the contexts of the moment
set the cost and nothing is compiled for them.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS, PageFormat
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS
from layers import page_rows
from layers.kernels.attention.contract import PLAIN, Demand, Options, Stretch
from layers.kernels.attention.mask import MaskBounds, mask_bounds, visible
from layers.kernels.device import Device
from layers.linear import soft_cap
from layers.ragged import Rectangle
from layers.reduce import row_sum

T = TypeVar("T")
_MASKED = -1e30
_DIVIDED_ROWS = 8  # from here on, rows that decode are worth a loop of their own
_BLOCK_DIAGONAL_ROWS = 16  # up to here, query rows are too few to pay for transposing keys
# XLA's CPU backend sums the rows of a bfloat16 product in one order whatever their number, if that
# is a multiple of 16 and the product no wider than this; with AMX, whose tiles are 32 elements
# deep, heads have to be whole tiles too.
_STEADY_ROWS, _STEADY_WIDTH, _STEADY_HEAD = 16, 1024, 32


def attend_dense(
    q_YWNH: jax.Array,
    k_YWKH: jax.Array,
    v_YWKH: jax.Array,
    rectangle: Rectangle,
    options: Options = PLAIN,
    chosen_YWS: jax.Array | None = None,
) -> jax.Array:
    """Attention of rows among themselves, without a cache: float32 [Y, W, N, value width].
    Differentiable. `chosen_YWS` says which of a row's tokens a query reads of those that it sees.
    """
    kv_position_YS = rectangle.kv_position_YW
    mask_YWS = _mask(kv_position_YS[:, None, :], bounds(rectangle, options))
    if rectangle.start_YW is not None:
        mask_YWS &= kv_position_YS[:, None, :] >= rectangle.start_YW[:, :, None]
    if chosen_YWS is not None:
        mask_YWS &= chosen_YWS
    return attend_masked(q_YWNH, k_YWKH, v_YWKH, mask_YWS, options)


def attend_masked(
    q_YWNH: jax.Array,
    k_YSKH: jax.Array,
    v_YSKH: jax.Array,
    mask_YWS: jax.Array,
    options: Options = PLAIN,
) -> jax.Array:
    """Attention of rows over keys that a mask allows each query: float32 [Y, W, N, value width]."""
    Y, W, N, H = q_YWNH.shape
    K = k_YSKH.shape[2]
    q_YWKGH = q_YWNH.reshape(Y, W, K, N // K, H)
    scores = jnp.einsum("YWKGH,YSKH->YKGWS", q_YWKGH, k_YSKH, preferred_element_type=jnp.float32)
    scores = soft_cap(scores, options.score_cap)
    scores = jnp.where(mask_YWS[:, None, None], scores, _MASKED)
    if options.sinks_N is not None:
        sinks = jnp.broadcast_to(options.sinks_N.reshape(K, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k_YSKH.shape[1]].astype(v_YSKH.dtype)
    out = jnp.einsum("YKGWS,YSKH->YWKGH", weights, v_YSKH, preferred_element_type=jnp.float32)
    return out.reshape(Y, W, N, -1)


def limit(demand: Demand, device: Device) -> str | None:
    """The reference runs everywhere and reads every page format."""
    return None


def attend_pages(
    q_YWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.AttendPages`."""
    stretch = Stretch(pages, rectangle.tables[group], bounds(rectangle, options))
    return attend_stretches(q_YWNH, (stretch,), rectangle.valid_YW, page_format, options)


def attend_stretches(
    q_YWNH: jax.Array,
    stretches: tuple[Stretch, ...],
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """One softmax over several stretches of pages of a format, one behind the other: float32
    [Y, W, N, value width]. With `options.deterministic`, products have numbers of rows that do not
    change their sums.
    """
    return _softmax(q_YWNH, stretches, valid_YW, page_format, options)[0]


def attend_part(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AttendPart`."""
    return _softmax(q_YWNH, (stretch,), valid_YW, page_format, options)


def _softmax(
    q_YWNH: jax.Array,
    stretches: tuple[Stretch, ...],
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`attend_stretches`, and the log-sum-exp of each head's scores, float32 [Y, W, N]."""
    Y, W, N, _ = q_YWNH.shape
    is_diagonal, tile, rows = _tiling(q_YWNH, page_format, options.deterministic)
    padding = (0, 0), (0, -W % tile)
    q_YWNH = jnp.pad(q_YWNH, (*padding, (0, 0), (0, 0)))
    sinks_N = jnp.full(N, _MASKED, jnp.float32) if options.sinks_N is None else options.sinks_N
    if is_diagonal:
        fold, finish, init = _block_diagonal(q_YWNH, page_format, rows, options.score_cap, sinks_N)
    else:
        fold, finish, init = _per_head(q_YWNH, page_format, tile, rows, options.score_cap, sinks_N)

    counts = _counts(Y) if is_diagonal else (Y,)
    head = -(-options.first_tokens // BLOCK_TOKENS)
    carry = init
    for stretch in stretches:
        last_Y = jnp.max(jnp.where(valid_YW, stretch.bounds.last_YW, -1), axis=1)
        bounds = jax.tree.map(lambda x_YW: jnp.pad(x_YW, padding, mode="edge"), stretch.bounds)
        oldest = jnp.int32(0) if bounds.first_YW is None else jnp.min(bounds.first_YW)
        read = functools.partial(
            _read_block, stretch._replace(bounds=bounds), page_format, q_YWNH.dtype
        )
        carry = _in_blocks(fold, read, carry, oldest // BLOCK_TOKENS, last_Y, counts, head)
    out_YWNH, total_YWN = finish(carry)
    return out_YWNH[:, :W], total_YWN[:, :W]


def _read_block(
    stretch: Stretch, page_format: PageFormat, dtype: jax.typing.DTypeLike, count: int, j: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of the j-th block of `count` rows, [Y, S, X] each, and the mask [Y, W, S]."""
    block_pages = BLOCK_TOKENS // stretch.pages.shape[1]
    table_YP = stretch.table_YP[:count]
    assert table_YP.shape[-1] % block_pages == 0  # a slice past the end would be moved, silently
    ids_YP = jax.lax.dynamic_slice_in_dim(table_YP, j * block_pages, block_pages, axis=-1)
    kv_position_S = j * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
    mask_YWS = _mask(kv_position_S, jax.tree.map(lambda x_YW: x_YW[:count], stretch.bounds))
    return *_keys_values(stretch.pages, ids_YP, page_format, dtype), mask_YWS


def _in_blocks(
    fold: Callable[..., T],
    read: Callable[..., tuple[jax.Array, ...]],
    carry: T,
    start: jax.Array,
    last_Y: jax.Array,
    counts: tuple[int, ...],
    head: int,
) -> T:
    """The softmax after all blocks of a stretch, each folded in.

    Args:
        read: (rows, j) -> what `fold` takes of the j-th block, for the first rows.
        start: the first block of the windows.
        last_Y: i32[Y], the last key that any query of a row sees.
        counts: rows of the first blocks, of later ones, and so on.
        head: blocks of the first tokens, which every row sees beside its window.
    """
    ended = []

    def block(count: int, j: jax.Array, carry: T) -> T:
        return fold(carry, *read(count, j))

    if head:
        carry = jax.lax.fori_loop(0, head, functools.partial(block, counts[0]), carry)
        start = jnp.maximum(start, head)
    for count, next_count in zip(counts, (*counts[1:], 0), strict=True):
        stop = jnp.max(last_Y[next_count:count]) // BLOCK_TOKENS + 1
        carry = jax.lax.fori_loop(start, stop, functools.partial(block, count), carry)
        folded, carry = carry, jax.tree.map(lambda x: x[:next_count], carry)  # noqa: B023
        ended.append(jax.tree.map(lambda x: x[next_count:], folded))  # noqa: B023
        start = jnp.maximum(start, stop)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ended[::-1])


def bounds(rectangle: Rectangle, options: Options) -> MaskBounds:
    """What queries see of their sequences' tokens."""
    return mask_bounds(rectangle, options.window, options.chunked, options.first_tokens)


def _counts(num_rows: int) -> tuple[int, ...]:
    """Rows of the first blocks, and how many of them go on to later ones: rows are sorted longest
    first (`Scheduler.schedule`), and a block's cost grows with its rows.
    """
    if num_rows < _DIVIDED_ROWS:
        return (num_rows,)
    return num_rows, -(-num_rows // 2), -(-num_rows // 4)


def _tiling(
    q_YWNH: jax.Array, page_format: PageFormat, deterministic: bool
) -> tuple[bool, int, int]:
    """How queries become the rows of products with keys: whether block-diagonal or a KV head at a
    time, the tokens of a tile, and what the rows of a product are a multiple of.
    """
    _, W, N, H = q_YWNH.shape
    is_diagonal = W * N <= _BLOCK_DIAGONAL_ROWS
    if not deterministic:
        return is_diagonal, W, 1
    if q_YWNH.dtype == jnp.bfloat16 and H % _STEADY_HEAD == 0:
        return is_diagonal and page_format.keys.stop <= _STEADY_WIDTH, W, _STEADY_ROWS
    return False, MIN_DETERMINISTIC_ROWS, 1


def _mask(kv_position: jax.Array, bounds: MaskBounds) -> jax.Array:
    """Which keys each query sees, [Y, W, S], of keys at KV positions [S] or [Y, 1, S]."""
    return visible(kv_position, *jax.tree.map(lambda x_YW: x_YW[:, :, None], bounds))


def _keys_values(
    pages: jax.Array, ids_YP: jax.Array, page_format: PageFormat, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of whole pages, [Y, S, K H] each; gathered separately to avoid a slice, but
    where they are computed. Of pages that differ by KV head, [Y, K, P], those of each.
    """
    if page_format.is_quantized:
        stored_YSX = _gather(pages, ids_YP, slice(0, page_format.stored_width), 1)
        row_YSX = page_rows.dequantize(stored_YSX, page_format, dtype)
        keys, values = row_YSX[..., page_format.keys], row_YSX[..., page_format.values]
    else:
        keys, values = (
            _gather(pages, ids_YP, part, page_format.kv_heads)
            for part in (page_format.keys, page_format.values)
        )
        keys, values = page_rows.decode(keys), page_rows.decode(values)
    if page_format.value_width == page_format.key_width and page_format.values_in_keys:
        # A masked value is multiplied by 0, which its key's NaN, left in a page, would survive.
        values = jnp.where(jnp.isfinite(values), values, 0)
    return keys, values


def _gather(pages: jax.Array, ids_YP: jax.Array, part: slice, kv_heads: int) -> jax.Array:
    """Rows of whole pages, as stored, [Y, S, X]; each KV head's where ids are [Y, K, P]."""
    width = part.stop - part.start
    if ids_YP.ndim == 3:
        starts = range(part.start, part.stop, width // kv_heads)
        heads = [
            _gather(pages, ids_YP[:, head], slice(start, start + width // kv_heads), 1)
            for head, start in enumerate(starts)
        ]
        return jnp.concatenate(heads, axis=-1)
    start_YP2 = jnp.stack([ids_YP, jnp.full_like(ids_YP, part.start)], axis=-1)
    if pages.shape[1] == 1:  # an axis of one would be a tile of its own on a TPU, and a copy of all
        rows_SX = pages.reshape(pages.shape[0], -1)
        dims = jax.lax.GatherDimensionNumbers((2,), (0,), (0, 1))
        return jax.lax.gather(rows_SX, start_YP2, dims, (1, width), mode="promise_in_bounds")
    dims = jax.lax.GatherDimensionNumbers((2, 3), (0,), (0, 2))
    rows_YPX = jax.lax.gather(
        pages, start_YP2, dims, (1, pages.shape[1], width), mode="promise_in_bounds"
    )
    return rows_YPX.reshape(ids_YP.shape[0], -1, width)


def _start(sinks_1: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax before its first key: of a sink of mass 1, [..., 1], and no value."""
    return sinks_1, jnp.ones_like(sinks_1), jnp.zeros((*sinks_1.shape[:-1], width), jnp.float32)


def _accumulate(carry, scores, mask, v_ZSX):  # noqa: ANN001, ANN202
    """One step of the online softmax: running maximum, mass and weighted values."""
    maximum, mass, values = carry
    scores = jnp.where(mask, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - new_maximum), jnp.exp(maximum - new_maximum)
    mass = mass * decay + row_sum(weights)
    return new_maximum, mass, values * decay + dot(weights.astype(v_ZSX.dtype), v_ZSX, 1)


def dot(x_ZUX: jax.Array, y_Z: jax.Array, contract: int) -> jax.Array:
    """Products of a batch, the last axis of x with axis `contract` of y; float32. One batch axis:
    with two, XLA's CPU backend would compute in float32.
    """
    exact = jax.lax.Precision.HIGHEST if x_ZUX.dtype == jnp.float32 else None
    dims = (((2,), (contract,)), ((0,), (0,)))
    return jax.lax.dot_general(
        x_ZUX, y_Z, dims, precision=exact, preferred_element_type=jnp.float32
    )


def _block_diagonal(  # noqa: ANN202
    q_YWNH: jax.Array, page_format: PageFormat, rows: int, cap: float | None, sinks_N: jax.Array
):
    """Few query rows: each sits in its head's columns of [K H], so keys stay untransposed."""
    Y, W, N, H = q_YWNH.shape
    K, U = page_format.kv_heads, W * N
    is_group_NK1 = jnp.repeat(jnp.eye(K, dtype=bool), N // K, axis=0)[:, :, None]
    q_YUX = jnp.where(is_group_NK1, q_YWNH[:, :, :, None], 0).reshape(Y, U, K * H)
    q_YUX = _padded(q_YUX, rows)

    def fold(carry, k_YSX, v_YSX, mask_YWS):  # noqa: ANN001, ANN202
        mask_YUS = _padded(jnp.repeat(mask_YWS, N, axis=1), rows)
        scores_YUS = dot(q_YUX[: len(k_YSX)], k_YSX, 2)
        return _accumulate(carry, soft_cap(scores_YUS, cap), mask_YUS, v_YSX)

    def finish(carry):  # noqa: ANN001, ANN202
        maximum_YU1, mass_YU1, values_YUX = carry
        values_YWNKH = (values_YUX / mass_YU1)[:, :U].reshape(Y, W, N, K, page_format.value_width)
        total_YU1 = maximum_YU1 + jnp.log(mass_YU1)
        return jnp.where(is_group_NK1, values_YWNKH, 0).sum(3), total_YU1[:, :U].reshape(Y, W, N)

    sinks_YU1 = jnp.broadcast_to(sinks_N, (Y, W, N)).reshape(Y, U, 1)
    return fold, finish, _start(_padded(sinks_YU1, rows), K * page_format.value_width)


def _per_head(  # noqa: ANN202
    q_YWNH: jax.Array,
    page_format: PageFormat,
    tile: int,
    rows: int,
    cap: float | None,
    sinks_N: jax.Array,
):
    """Many query rows: a product for each sequence and KV head (Z) and tile of tokens (X)."""
    Y, W, N, H = q_YWNH.shape
    K, G = page_format.kv_heads, N // page_format.kv_heads
    num_tiles, U = W // tile, tile * G
    q_XZUH = q_YWNH.reshape(Y, num_tiles, tile, K, G, H).transpose(1, 0, 3, 2, 4, 5)
    q_XZUH = _padded(q_XZUH.reshape(num_tiles, Y * K, U, H), rows)

    def fold(carry, k_YSX, v_YSX, mask_YWS):  # noqa: ANN001, ANN202
        k_ZSH, v_ZSH = (
            x_YSX.reshape(Y, -1, K, width).swapaxes(1, 2).reshape(Y * K, -1, width)
            for x_YSX, width in ((k_YSX, H), (v_YSX, page_format.value_width))
        )
        mask_XYUS = jnp.repeat(mask_YWS.reshape(Y, num_tiles, tile, -1), G, axis=2).swapaxes(0, 1)
        mask_XZUS = jnp.repeat(_padded(mask_XYUS, rows), K, axis=1)

        def fold_tile(tiled):  # noqa: ANN001, ANN202
            carry, q_ZUH, mask_ZUS = tiled
            return _accumulate(carry, soft_cap(dot(q_ZUH, k_ZSH, 2), cap), mask_ZUS, v_ZSH)

        tiles = carry, q_XZUH, mask_XZUS
        if num_tiles == 1:
            folded = fold_tile(jax.tree.map(lambda x: x[0], tiles))
            return jax.tree.map(lambda x: x[None], folded)
        return jax.lax.map(fold_tile, tiles)

    def finish(carry):  # noqa: ANN001, ANN202
        maximum, mass, values = carry

        def by_token(x_XZUH):  # noqa: ANN001, ANN202
            x_XYKWGH = x_XZUH[:, :, :U].reshape(num_tiles, Y, K, tile, G, -1)
            return x_XYKWGH.transpose(1, 0, 3, 2, 4, 5).reshape(Y, W, N, -1)

        return by_token(values / mass), by_token(maximum + jnp.log(mass))[..., 0]

    sinks_XYKWG = jnp.broadcast_to(sinks_N.reshape(K, 1, G), (num_tiles, Y, K, tile, G))
    sinks_XZU1 = sinks_XYKWG.reshape(num_tiles, Y * K, U, 1)
    return fold, finish, _start(_padded(sinks_XZU1, rows), page_format.value_width)


def _padded(x_UX: jax.Array, rows: int) -> jax.Array:
    """[..., U, X] with U a multiple of `rows`; what is added is 0, and sees nothing."""
    padding = (0, -x_UX.shape[-2] % rows), (0, 0)
    return jnp.pad(x_UX, ((0, 0),) * (x_UX.ndim - 2) + padding)
