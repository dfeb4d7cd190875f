"""Attention over pages in plain jnp: the oracle of every kernel, and the CPU path.

Blocks of 128 tokens are gathered through the page table and folded into an online softmax
(Milakov & Gimelshein 2018, arXiv 1805.02867). Trip counts are data, so the contexts of the moment
set the cost and nothing is compiled for them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS
from configs.engine import MIN_DETERMINISTIC_ROWS
from layers import kv_cache
from layers.kernels.attention.contract import PLAIN, Demand, Options
from layers.kernels.attention.mask import Sight, sight_of, visible
from layers.kernels.device import Device
from layers.linear import soft_cap
from layers.ragged import Ragged, Rectangle
from layers.reduce import row_sum

_MASKED = -1e30
_DIVIDED_ROWS = 8  # from here on, rows that decode are worth a loop of their own
_BLOCK_DIAGONAL_ROWS = 16  # up to here, query rows are too few to pay for transposing keys
# XLA's CPU backend sums the rows of a bfloat16 product in one order whatever their number, if that
# is a multiple of 16 and the product no wider than this.
_STEADY_ROWS, _STEADY_WIDTH = 16, 1024


def attend_dense(
    q_CWNH: jax.Array,
    k_CWKH: jax.Array,
    v_CWKH: jax.Array,
    rectangle: Rectangle,
    options: Options = PLAIN,
) -> jax.Array:
    """Attention of rows among themselves, without a cache: float32 [C, W, N, H]. Differentiable."""
    C, W, N, H = q_CWNH.shape
    K = k_CWKH.shape[2]
    q_CWKGH = q_CWNH.reshape(C, W, K, N // K, H)
    scores = jnp.einsum("CWKGH,CSKH->CKGWS", q_CWKGH, k_CWKH, preferred_element_type=jnp.float32)
    mask_CWS = _mask(rectangle.place_CW[:, None, :], sight_of(rectangle, options.window))
    scores = _capped(scores, options.score_cap)
    scores = jnp.where(mask_CWS[:, None, None], scores, _MASKED)
    if options.sinks_N is not None:
        sinks = jnp.broadcast_to(options.sinks_N.reshape(K, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :W].astype(v_CWKH.dtype)
    out = jnp.einsum("CKGWS,CSKH->CWKGH", weights, v_CWKH, preferred_element_type=jnp.float32)
    return out.reshape(C, W, N, H)


def limit(demand: Demand, device: Device) -> None:
    """Nothing keeps the reference from anything on any device."""


def layout(
    num_pages: int, page_tokens: int, num_kv_heads: int, head_width: int, dtype: str
) -> jax.ShapeDtypeStruct:
    """Token-major [pages, page tokens, 2 K H], keys before values."""
    return kv_cache.token_major(num_pages, page_tokens, 2 * num_kv_heads * head_width, dtype)


def write(
    pages: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, ragged: Ragged, group: int
) -> jax.Array:
    """Scatters rows of 2 K heads."""
    return kv_cache.write(pages, jnp.concatenate([k_TKH, v_TKH], axis=1), ragged, group)


def attend_pages(
    q_CWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.AttendPages`; where `options.deterministic`, the rows of a product come in numbers
    that do not show in their sums.
    """
    (_, W, N, _), width = q_CWNH.shape, pages.shape[2] // 2
    table_CP, sight = rectangle.tables[group], sight_of(rectangle, options.window)
    is_diagonal, tile, rows = _tiling(q_CWNH, width, options.deterministic)
    padding = (0, 0), (0, -W % tile)
    q_CWNH = jnp.pad(q_CWNH, (*padding, (0, 0), (0, 0)))
    last_C = jnp.max(jnp.where(rectangle.valid_CW, sight.last_CW, 0), axis=1)
    sight = jax.tree.map(lambda x_CW: jnp.pad(x_CW, padding, mode="edge"), sight)
    sinks_N = jnp.full(N, _MASKED, jnp.float32) if options.sinks_N is None else options.sinks_N
    if is_diagonal:
        fold, finish, init = _block_diagonal(q_CWNH, width, rows, options.score_cap, sinks_N)
    else:
        fold, finish, init = _per_head(q_CWNH, width, tile, rows, options.score_cap, sinks_N)

    oldest = jnp.int32(0) if sight.first_CW is None else jnp.min(sight.first_CW)
    block_pages = BLOCK_TOKENS // pages.shape[1]
    assert table_CP.shape[1] % block_pages == 0  # a slice past the end would be moved, silently

    def block(count: int, j: jax.Array, carry: Any) -> Any:
        ids_CP = jax.lax.dynamic_slice_in_dim(
            table_CP[:count], j * block_pages, block_pages, axis=1
        )
        place_S = j * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
        mask_CWS = _mask(place_S, jax.tree.map(lambda x_CW: x_CW[:count], sight))
        return fold(carry, _half(pages, ids_CP, 0), _half(pages, ids_CP, 1), mask_CWS)

    counts = _counts(len(table_CP)) if is_diagonal else (len(table_CP),)
    start, carry, ended = oldest // BLOCK_TOKENS, init, []
    for count, next_count in zip(counts, (*counts[1:], 0), strict=True):
        stop = jnp.max(last_C[next_count:count]) // BLOCK_TOKENS + 1
        carry = jax.lax.fori_loop(start, stop, functools.partial(block, count), carry)
        carry, rest = _split(carry, next_count)
        ended.append(rest)
        start = jnp.maximum(start, stop)
    return finish(jax.tree.map(lambda *parts: jnp.concatenate(parts), *ended[::-1]))[:, :W]


def _counts(num_rows: int) -> tuple[int, ...]:
    """How many rows go through the first blocks, and how many of the first rows on through later
    ones: rows come longest first (`Scheduler.schedule`), and a block costs by its rows.
    """
    if num_rows < _DIVIDED_ROWS:
        return (num_rows,)
    return num_rows, -(-num_rows // 2), -(-num_rows // 4)


def _split(carry: Any, count: int) -> tuple[Any, Any]:
    """The first rows of every array, and the others."""
    return jax.tree.map(lambda x: x[:count], carry), jax.tree.map(lambda x: x[count:], carry)


def _tiling(q_CWNH: jax.Array, width: int, deterministic: bool) -> tuple[bool, int, int]:
    """How queries become the rows of products with keys of `width` elements: whether block-diagonal
    or a KV head at a time, the tokens of a tile, and what the rows of a product are a multiple of.
    """
    _, W, N, H = q_CWNH.shape
    is_diagonal = W * N <= _BLOCK_DIAGONAL_ROWS
    if not deterministic:
        return is_diagonal, W, 1
    if q_CWNH.dtype == jnp.bfloat16 and H % _STEADY_ROWS == 0:
        return is_diagonal and width <= _STEADY_WIDTH, W, _STEADY_ROWS
    return False, MIN_DETERMINISTIC_ROWS, 1


def _mask(place: jax.Array, sight: Sight) -> jax.Array:
    """Which keys each query sees, [C, W, S], of keys at places [S] or [C, 1, S]."""
    return visible(place, *jax.tree.map(lambda x_CW: x_CW[:, :, None], sight))


def _capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Scores within a soft limit, before the mask is."""
    return scores if cap is None else soft_cap(scores, cap)


def _half(pages: jax.Array, ids_CP: jax.Array, half: int) -> jax.Array:
    """Keys (0) or values (1) of whole pages, [C, S, K H]: gathered apart, which costs no slice."""
    width = pages.shape[2] // 2
    start_CP2 = jnp.stack([ids_CP, jnp.full_like(ids_CP, half * width)], axis=-1)
    dims = jax.lax.GatherDimensionNumbers((2, 3), (0,), (0, 2))
    part = jax.lax.gather(
        pages, start_CP2, dims, (1, pages.shape[1], width), mode="promise_in_bounds"
    )
    return kv_cache.decode(part).reshape(ids_CP.shape[0], -1, width)


def _start(sinks_1: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax before its first key: of a sink of mass 1, [..., 1], and no value."""
    return sinks_1, jnp.ones_like(sinks_1), jnp.zeros((*sinks_1.shape[:-1], width), jnp.float32)


def _accumulate(carry, scores, mask, v_BSX):  # noqa: ANN001, ANN202
    """One step of the online softmax: running maximum, mass and weighted values."""
    maximum, mass, values = carry
    scores = jnp.where(mask, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - new_maximum), jnp.exp(maximum - new_maximum)
    mass = mass * decay + row_sum(weights)
    return new_maximum, mass, values * decay + _dot(weights.astype(v_BSX.dtype), v_BSX, 1)


def _dot(x_BRX: jax.Array, y_B: jax.Array, contract: int) -> jax.Array:
    """Products of a batch, contracting the last axis of x with axis `contract` of y; float32.

    One batch axis: with two, XLA's CPU backend would compute in float32.
    """
    exact = jax.lax.Precision.HIGHEST if x_BRX.dtype == jnp.float32 else None
    dims = (((2,), (contract,)), ((0,), (0,)))
    return jax.lax.dot_general(
        x_BRX, y_B, dims, precision=exact, preferred_element_type=jnp.float32
    )


def _block_diagonal(  # noqa: ANN202
    q_CWNH: jax.Array, width: int, rows: int, cap: float | None, sinks_N: jax.Array
):
    """Few query rows: each sits in its own head's columns of [K H], so keys are used as they lie,
    untransposed.
    """
    C, W, N, H = q_CWNH.shape
    K, R = width // H, W * N
    own_NK1 = jnp.repeat(jnp.eye(K, dtype=bool), N // K, axis=0)[:, :, None]
    q_CRX = jnp.where(own_NK1, q_CWNH[:, :, :, None], 0).reshape(C, R, width)
    q_CRX = _padded(q_CRX, rows)

    def fold(carry, k_CSX, v_CSX, mask_CWS):  # noqa: ANN001, ANN202
        mask_CRS = _padded(jnp.repeat(mask_CWS, N, axis=1), rows)
        scores_CRS = _dot(q_CRX[: len(k_CSX)], k_CSX, 2)
        return _accumulate(carry, _capped(scores_CRS, cap), mask_CRS, v_CSX)

    def finish(carry):  # noqa: ANN001, ANN202
        _, mass_CR1, values_CRX = carry
        values_CWNKH = (values_CRX / mass_CR1)[:, :R].reshape(C, W, N, K, H)
        return jnp.where(own_NK1, values_CWNKH, 0).sum(3)

    sinks_CR1 = jnp.broadcast_to(sinks_N, (C, W, N)).reshape(C, R, 1)
    return fold, finish, _start(_padded(sinks_CR1, rows), width)


def _per_head(  # noqa: ANN202
    q_CWNH: jax.Array, width: int, tile: int, rows: int, cap: float | None, sinks_N: jax.Array
):
    """Many query rows: one product a sequence and KV head (B of them), with the query rows that
    read it, a tile of tokens at a time.
    """
    C, W, N, H = q_CWNH.shape
    K, G = width // H, N // (width // H)
    num_tiles, R = W // tile, tile * G
    q_UBRH = q_CWNH.reshape(C, num_tiles, tile, K, G, H).transpose(1, 0, 3, 2, 4, 5)
    q_UBRH = _padded(q_UBRH.reshape(num_tiles, C * K, R, H), rows)

    def fold(carry, k_CSX, v_CSX, mask_CWS):  # noqa: ANN001, ANN202
        k_BSH, v_BSH = (
            x_CSX.reshape(C, -1, K, H).swapaxes(1, 2).reshape(C * K, -1, H)
            for x_CSX in (k_CSX, v_CSX)
        )
        mask_UCRS = jnp.repeat(mask_CWS.reshape(C, num_tiles, tile, -1), G, axis=2).swapaxes(0, 1)
        mask_UBRS = jnp.repeat(_padded(mask_UCRS, rows), K, axis=1)

        def fold_tile(tiled):  # noqa: ANN001, ANN202
            carry, q_BRH, mask_BRS = tiled
            return _accumulate(carry, _capped(_dot(q_BRH, k_BSH, 2), cap), mask_BRS, v_BSH)

        tiles = carry, q_UBRH, mask_UBRS
        if num_tiles == 1:
            folded = fold_tile(jax.tree.map(lambda x: x[0], tiles))
            return jax.tree.map(lambda x: x[None], folded)
        return jax.lax.map(fold_tile, tiles)

    def finish(carry):  # noqa: ANN001, ANN202
        _, mass, values = carry
        values = (values / mass)[:, :, :R].reshape(num_tiles, C, K, tile, G, H)
        return values.transpose(1, 0, 3, 2, 4, 5).reshape(C, W, N, H)

    sinks_UCKRG = jnp.broadcast_to(sinks_N.reshape(K, 1, G), (num_tiles, C, K, tile, G))
    sinks_UBR1 = sinks_UCKRG.reshape(num_tiles, C * K, R, 1)
    return fold, finish, _start(_padded(sinks_UBR1, rows), H)


def _padded(x_RX: jax.Array, rows: int) -> jax.Array:
    """[..., R, X] with R a multiple of `rows`; what is added is 0, and sees nothing."""
    padding = (0, -x_RX.shape[-2] % rows), (0, 0)
    return jnp.pad(x_RX, ((0, 0),) * (x_RX.ndim - 2) + padding)
