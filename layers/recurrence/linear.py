"""Linear recurrence of matrix states: S_t = exp(g_t) S_(t-1) + k_t v_t^T, out_t = S_t^T q_t.

Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) and BASED (Arora et al. 2024, arXiv
2402.18668) have no decay, lightning attention (MiniMax-01, arXiv 2501.08313) a constant one a head,
Mamba-2 (Dao & Gu 2024, arXiv 2405.21060) one that depends on the token.

Queries and keys may have K heads where values have N = K G: G neighbours share one. A token whose
key is 0 and whose log decay is 0 leaves the state as it was.
"""

import jax
import jax.numpy as jnp

from configs.errors import InputError
from layers.recurrence import decays, order
from layers.recurrence.sums import product, read, rounded


def recurrent(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    log_decay_YWN: jax.Array | None,
    before_YNMH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token: outputs float32 [Y, W, N, H] and the states after each, [Y, W, N, M, H]. On a
    CPU a token's bits depend on neither Y, W nor where a row was split. `log_decay_YWN` is <= 0, or
    None for no decay. Raises InputError if N is no multiple of K.
    """
    shared = _heads_per_key(k_YWKM, v_YWNH.shape[2])

    def step(state_YNMH: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_YKM, k_YKM, v_YNH, decay_YN = token
        q_YNM, k_YNM = jnp.repeat(q_YKM, shared, axis=1), jnp.repeat(k_YKM, shared, axis=1)
        if decay_YN is not None:
            state_YNMH = rounded(decay_YN[:, :, None, None] * state_YNMH)
        state_YNMH += rounded(k_YNM[..., None] * v_YNH[:, :, None])
        return state_YNMH, read(state_YNMH, q_YNM)

    decay_YWN = None if log_decay_YWN is None else jnp.exp(log_decay_YWN)
    return order.by_token(step, before_YNMH, (q_YWKM, k_YWKM, v_YWNH, decay_YWN))


def chunked(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    log_decay_YWN: jax.Array | None,
    before_YNMH: jax.Array,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)), in parallel within, the state-space duality of Mamba-2:
    outputs float32 [Y, W, N, H] and the states after every chunk, [Y, C, N, M, H]. `log_decay_YWN`
    as for `recurrent`, `resumes` as for `order.by_chunk`. Raises InputError if N is no multiple of
    K, or there are several rows to resume in.
    """
    num_rows, num_tokens, num_heads, width = v_YWNH.shape
    shared = _heads_per_key(k_YWKM, num_heads)
    if log_decay_YWN is None:
        log_decay_YWN = jnp.zeros((num_rows, num_tokens, num_heads))
    size = min(chunk, num_tokens)
    q_YCTKM, k_YCTKM = order.in_chunks(q_YWKM, size), order.in_chunks(k_YWKM, size)
    v_YCTKGH = _by_key(order.in_chunks(v_YWNH, size), 3, shared)
    running_YCTN = decays.running(order.in_chunks(log_decay_YWN, size))
    running_YCTKG = _by_key(running_YCTN, 4, shared)

    running_YCKGT = jnp.moveaxis(running_YCTKG, 3, -1)
    log_YCKGTS = decays.between(running_YCKGT[..., None], running_YCKGT[..., None, :])
    decay_YCKGTS = jnp.exp(jnp.where(jnp.tri(size, dtype=bool), log_YCKGTS, -jnp.inf))
    scores_YCKTS = product("YCTKM,YCSKM->YCKTS", q_YCTKM, k_YCTKM)
    weights_YCKGTS = scores_YCKTS[:, :, :, None] * decay_YCKGTS
    out_YCTKGH = product("YCKGTS,YCSKGH->YCTKGH", weights_YCKGTS, v_YCTKGH)

    to_end_YCTKG = jnp.exp(decays.between(running_YCTKG[:, :, :, -1:], running_YCTKG))
    added_YCKGMH = product("YCTKM,YCTKGH->YCKGMH", k_YCTKM, v_YCTKGH * to_end_YCTKG[..., None])
    added_YCNMH = added_YCKGMH.reshape(num_rows, -1, *before_YNMH.shape[1:])
    decay_YCN = jnp.exp(decays.between(running_YCTN[:, :, :, -1]))

    def step(state_YNMH: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        decay_YN, added_YNMH = inputs
        return decay_YN[..., None, None] * state_YNMH + added_YNMH, state_YNMH

    inputs = decay_YCN, added_YCNMH
    before_YCNMH, after_YCNMH = order.by_chunk(step, before_YNMH, inputs, resumes)
    before_YCKGMH = _by_key(before_YCNMH, 2, shared)
    from_before_YCTKGH = product("YCTKM,YCKGMH->YCTKGH", q_YCTKM, before_YCKGMH)
    out_YCTKGH += jnp.exp(decays.between(running_YCTKG))[..., None] * from_before_YCTKGH
    out_YCTNH = out_YCTKGH.reshape(*out_YCTKGH.shape[:3], num_heads, width)
    return order.in_rows(out_YCTNH, num_tokens), after_YCNMH


def _heads_per_key(k_YWKM: jax.Array, num_heads: int) -> int:
    keys = k_YWKM.shape[2]
    if num_heads % keys:
        raise InputError(f"{num_heads} heads of values cannot share {keys} of keys: no multiple")
    return num_heads // keys


def _by_key(x_N: jax.Array, axis: int, shared: int) -> jax.Array:
    """[..., N, ...] -> [..., K, G, ...]."""
    return x_N.reshape(*x_N.shape[:axis], -1, shared, *x_N.shape[axis + 1 :])
