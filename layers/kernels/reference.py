"""Attention over pages in plain jnp: the oracle of every kernel, and the CPU path.

Blocks of 128 tokens are gathered through the page table and folded into an online softmax
(Milakov & Gimelshein 2018, arXiv 1805.02867). The trip count is data, so the longest context of the
moment sets the cost and nothing is compiled for it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from layers import kv_cache
from layers.reduce import row_sum

_MASKED = -1e30
_BLOCK_DIAGONAL_ROWS = (
    16  # up to here, query rows are too few to pay for transposing a block of keys
)
_BLOCK_TOKENS = 128  # keys a trip: larger ones amortize more, and waste more on what is masked
_TILE = 8  # query tokens of a fixed tile: every shape then runs the same products


def visible(key_position: jax.Array, query_position: jax.Array, window: int | None) -> jax.Array:
    """The one mask: a query sees itself and what came before it, at most `window` tokens in all."""
    mask = key_position <= query_position
    if window is not None:
        mask &= key_position > query_position - window
    return mask


def attend_dense(
    q_CWNH: jax.Array,
    k_CWKH: jax.Array,
    v_CWKH: jax.Array,
    position_CW: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of rows among themselves, without a cache: float32 [C, W, N, H]. Differentiable."""
    C, W, N, H = q_CWNH.shape
    K = k_CWKH.shape[2]
    q_CWKGH = q_CWNH.reshape(C, W, K, N // K, H)
    scores = jnp.einsum("CWKGH,CSKH->CKGWS", q_CWKGH, k_CWKH, preferred_element_type=jnp.float32)
    mask_CWS = visible(position_CW[:, None, :], position_CW[:, :, None], window)
    scores = jnp.where(mask_CWS[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_CWKH.dtype)
    out = jnp.einsum("CKGWS,CSKH->CWKGH", weights, v_CWKH, preferred_element_type=jnp.float32)
    return out.reshape(C, W, N, H)


def attend_pages(
    q_CWNH: jax.Array,
    pages: jax.Array,
    table_CP: jax.Array,
    position_CW: jax.Array,
    window: int | None,
    deterministic: bool = False,
) -> jax.Array:
    """Attention of a rectangle over its sequences' pages: float32 [C, W, N, H].

    Args:
        q_CWNH: scaled queries, in the cache's precision.
        pages: [pages, page tokens, 2 K H], keys before values; this step's tokens are already
            written.
        table_CP: page ids; P page tokens are a multiple of 128.
        position_CW: positions of the queries; a key is visible up to its query's own.
        window: tokens a query sees, itself included.
        deterministic: same bits for a token whatever the rectangle: fixed tiles of queries.
    """
    C, W, N, H = q_CWNH.shape
    if deterministic:
        padded = -(-W // _TILE) * _TILE
        q_CWNH = jnp.pad(q_CWNH, ((0, 0), (0, padded - W), (0, 0), (0, 0)))
        position_CW = jnp.pad(position_CW, ((0, 0), (0, padded - W)), mode="edge")
    if W * N <= _BLOCK_DIAGONAL_ROWS and not deterministic:
        fold, finish, init = _block_diagonal(q_CWNH, pages.shape[2] // 2)
    else:
        fold, finish, init = _per_head(q_CWNH, pages.shape[2] // 2, deterministic)

    stop, oldest = jnp.max(position_CW) + 1, jnp.int32(0)
    if window is not None:
        oldest = jnp.maximum(0, jnp.min(position_CW) - window + 1)
    block_pages = _BLOCK_TOKENS // pages.shape[1]

    def block(j: jax.Array, carry: Any) -> Any:
        ids_CP = jax.lax.dynamic_slice_in_dim(table_CP, j * block_pages, block_pages, axis=1)
        kv_CSX = pages.at[ids_CP].get(mode="promise_in_bounds").reshape(C, _BLOCK_TOKENS, -1)
        k_CSX, v_CSX = jnp.split(kv_cache.decode(kv_CSX), 2, axis=-1)
        key_position = j * _BLOCK_TOKENS + jnp.arange(_BLOCK_TOKENS, dtype=jnp.int32)
        mask_CWS = visible(key_position, position_CW[:, :, None], window)
        return fold(carry, k_CSX, v_CSX, mask_CWS)

    carry = jax.lax.fori_loop(oldest // _BLOCK_TOKENS, -(-stop // _BLOCK_TOKENS), block, init)
    return finish(carry)[:, :W]


def _accumulate(carry, scores, mask, weighted_sum):  # noqa: ANN001, ANN202
    """One step of the online softmax: running maximum, mass and weighted values."""
    maximum, mass, values = carry
    scores = jnp.where(mask, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - new_maximum), jnp.exp(maximum - new_maximum)
    mass = mass * decay + row_sum(weights)
    return new_maximum, mass, values * decay + weighted_sum(weights)


def _dot(x, y, contract, batch):  # noqa: ANN001, ANN202
    return jax.lax.dot_general(x, y, (contract, batch), preferred_element_type=jnp.float32)


def _block_diagonal(q_CWNH: jax.Array, width: int):  # noqa: ANN202
    """Few query rows: each sits in its own head's columns of [K H], so keys are used as they lie,
    untransposed.
    """
    C, W, N, H = q_CWNH.shape
    K = width // H
    own_NK = jnp.repeat(jnp.eye(K, dtype=q_CWNH.dtype), N // K, axis=0)
    q_CRX = jnp.einsum("CWNH,NK->CWNKH", q_CWNH, own_NK).reshape(C, W * N, width)

    def fold(carry, k_CSX, v_CSX, mask_CWS):  # noqa: ANN001, ANN202
        mask_CRS = jnp.repeat(mask_CWS, N, axis=1)
        scores_CRS = _dot(q_CRX, k_CSX, ((2,), (2,)), ((0,), (0,)))
        return _accumulate(
            carry, scores_CRS, mask_CRS,
            lambda weights: _dot(weights.astype(v_CSX.dtype), v_CSX, ((2,), (1,)), ((0,), (0,))),
        )  # fmt: skip

    def finish(carry):  # noqa: ANN001, ANN202
        _, mass_CR1, values_CRX = carry
        values = (values_CRX / mass_CR1).reshape(C, W, N, K, H)
        return jnp.einsum("CWNKH,NK->CWNH", values, own_NK.astype(jnp.float32))

    rows = jnp.zeros((C, W * N, 1), jnp.float32)
    return fold, finish, (rows + _MASKED, rows, jnp.zeros((C, W * N, width), jnp.float32))


def _per_head(q_CWNH: jax.Array, width: int, deterministic: bool):  # noqa: ANN202
    """Many query rows: one product a KV head, with the G W query rows that read it."""
    C, W, N, H = q_CWNH.shape
    K, G = width // H, N // (width // H)
    tile = _TILE if deterministic else W
    q_XCKRH = q_CWNH.reshape(C, W // tile, tile, K, G, H).transpose(1, 0, 3, 2, 4, 5)
    q_XCKRH = q_XCKRH.reshape(W // tile, C, K, tile * G, H)

    def fold(carry, k_CSX, v_CSX, mask_CWS):  # noqa: ANN001, ANN202
        k_CKSH = k_CSX.reshape(C, -1, K, H).swapaxes(1, 2)
        v_CKSH = v_CSX.reshape(C, -1, K, H).swapaxes(1, 2)
        mask_XC1RS = jnp.repeat(mask_CWS.reshape(C, W // tile, tile, -1), G, axis=2).swapaxes(0, 1)[
            :, :, None
        ]

        def fold_tile(carry, q_CKRH, mask_C1RS):  # noqa: ANN001, ANN202
            scores = _dot(q_CKRH, k_CKSH, ((3,), (3,)), ((0, 1), (0, 1)))
            return _accumulate(
                carry, scores, mask_C1RS,
                lambda weights: _dot(weights.astype(v_CKSH.dtype), v_CKSH, ((3,), (2,)), ((0, 1),
                    (0, 1))),
            )  # fmt: skip

        if tile == W:
            folded = fold_tile(jax.tree.map(lambda x: x[0], carry), q_XCKRH[0], mask_XC1RS[0])
            return jax.tree.map(lambda x: x[None], folded)
        return jax.lax.map(lambda xs: fold_tile(*xs), (carry, q_XCKRH, mask_XC1RS))

    def finish(carry):  # noqa: ANN001, ANN202
        _, mass, values = carry
        values = (values / mass).reshape(W // tile, C, K, tile, G, H)
        return values.transpose(1, 0, 3, 2, 4, 5).reshape(C, W, N, H)

    rows = jnp.zeros((W // tile, C, K, tile * G, 1), jnp.float32)
    return fold, finish, (rows + _MASKED, rows, jnp.zeros((*rows.shape[:-1], H), jnp.float32))
