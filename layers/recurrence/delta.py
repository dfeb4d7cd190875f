"""Gated delta rule: S_t = D_t S_(t-1) + k_t beta_t (v_t - (D_t S_(t-1))^T k_t)^T, and out_t is
S_t^T q_t.

A token writes the difference between its value and what the state says of its key. The decay D is
a number a head in Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), and one a key channel in
Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692). A token whose key, beta and log decay are
0 leaves the state as it was.
"""

import jax
import jax.numpy as jnp

from layers.recurrence import decays, order
from layers.recurrence.sums import product, read, rounded


def recurrent(
    q_YWNM: jax.Array,
    k_YWNM: jax.Array,
    v_YWNH: jax.Array,
    log_decay: jax.Array,
    beta_YWN: jax.Array,
    before_YNMH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token; on a CPU a token's bits depend on neither Y, W nor where a row was split.

    Args:
        log_decay: <= 0, [Y, W, N] or [Y, W, N, M].

    Returns:
        Outputs float32 [Y, W, N, H] and the states after every token, float32 [Y, W, N, M, H].
    """

    def step(state_YNMH: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        q_YNM, k_YNM, v_YNH, decay_YNX, beta_YN = token
        state_YNMH = rounded(decay_YNX[..., None] * state_YNMH)
        change_YNH = beta_YN[..., None] * (v_YNH - rounded(read(state_YNMH, k_YNM)))
        state_YNMH += rounded(k_YNM[..., None] * change_YNH[:, :, None])
        return state_YNMH, read(state_YNMH, q_YNM)

    decay_YWNX = jnp.exp(_by_channel(log_decay))
    return order.by_token(step, before_YNMH, (q_YWNM, k_YWNM, v_YWNH, decay_YWNX, beta_YWN))


def chunked(
    q_YWNM: jax.Array,
    k_YWNM: jax.Array,
    v_YWNH: jax.Array,
    log_decay: jax.Array,
    beta_YWN: jax.Array,
    before_YNMH: jax.Array,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)), in parallel within (Yang et al. 2024, arXiv
    2406.06484): a triangular system gives what each token of a chunk writes.

    Args:
        log_decay: <= 0, [Y, W, N] or [Y, W, N, M].
        resumes: bool [C] and float32 [C, N, M, H]: the chunks of a single row that begin with a
            state of their own.

    Returns:
        Outputs float32 [Y, W, N, H] and the states after every chunk, float32 [Y, C, N, M, H].

    Raises:
        InputError: There are several rows to resume in.
    """
    num_tokens, width = v_YWNH.shape[1], v_YWNH.shape[3]

    def heads_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(order.in_chunks(x, min(chunk, num_tokens)), 2, 3)

    q_YCNTM, k_YCNTM, v_YCNTH = heads_first(q_YWNM), heads_first(k_YWNM), heads_first(v_YWNH)
    beta_YCNT1 = heads_first(beta_YWN)[..., None]
    running_YCNTX = decays.running(heads_first(_by_channel(log_decay)), axis=3)
    from_start_YCNTX = jnp.exp(decays.between(running_YCNTX))
    to_end_YCNTX = jnp.exp(decays.between(running_YCNTX[..., -1:, :], running_YCNTX))

    # With u_t what token t writes at its key: (1 + A) u = beta (v - k S), A the pairs of keys.
    readers_ZYCNTM = jnp.stack([q_YCNTM, beta_YCNT1 * k_YCNTM])
    pairs = _pairs if log_decay.ndim == 3 else _pairs_by_channel
    from_own_YCNTS, system_YCNTS = pairs(readers_ZYCNTM, k_YCNTM, running_YCNTX)
    right_YCNTX = jnp.concatenate([v_YCNTH, k_YCNTM * from_start_YCNTX], axis=-1) * beta_YCNT1
    solved_YCNTX = jax.lax.linalg.triangular_solve(
        system_YCNTS, right_YCNTX, left_side=True, lower=True, unit_diagonal=True
    )
    own_YCNTH, removed_YCNTM = solved_YCNTX[..., :width], solved_YCNTX[..., width:]

    def step(state_YNMH: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple]:
        own_YNTH, removed_YNTM, k_YNTM, decay_YNX = inputs
        change_YNTH = own_YNTH - product("YNTM,YNMH->YNTH", removed_YNTM, state_YNMH)
        added_YNMH = product("YNTM,YNTH->YNMH", k_YNTM, change_YNTH)
        return decay_YNX[..., None] * state_YNMH + added_YNMH, (state_YNMH, change_YNTH)

    decay_YCNX = from_start_YCNTX[:, :, :, -1]
    inputs = own_YCNTH, removed_YCNTM, k_YCNTM * to_end_YCNTX, decay_YCNX
    (before_YCNMH, change_YCNTH), after_YCNMH = order.by_chunk(step, before_YNMH, inputs, resumes)
    out_YCNTH = product("YCNTM,YCNMH->YCNTH", q_YCNTM * from_start_YCNTX, before_YCNMH)
    out_YCNTH += product("YCNTS,YCNSH->YCNTH", from_own_YCNTS, change_YCNTH)
    return order.in_rows(jnp.moveaxis(out_YCNTH, 3, 2), num_tokens), after_YCNMH


def _by_channel(log_decay: jax.Array) -> jax.Array:
    """[Y, W, N, X] with X = M, or 1 for all channels."""
    return log_decay if log_decay.ndim == 4 else log_decay[..., None]


def _pairs(a_ZYCNTM: jax.Array, k_YCNTM: jax.Array, running_YCNT1: jax.Array) -> jax.Array:
    """a_t k_s exp(g_(s+1) + .. + g_t) of all tokens s <= t of a chunk, 0 of others: float32
    [Z, Y, C, N, T, S].
    """
    log_YCNTS = decays.between(running_YCNT1, jnp.swapaxes(running_YCNT1, -1, -2))
    is_past_TS = jnp.tri(k_YCNTM.shape[3], dtype=bool)
    decay_YCNTS = jnp.exp(jnp.where(is_past_TS, log_YCNTS, -jnp.inf))
    return product("ZYCNTM,YCNSM->ZYCNTS", a_ZYCNTM, k_YCNTM) * decay_YCNTS


def _pairs_by_channel(
    a_ZYCNTM: jax.Array, k_YCNTM: jax.Array, running_YCNTM: jax.Array
) -> jax.Array:
    """`_pairs` with a decay a channel, which no longer is a factor of the product.

    It is one of either side, from s up to a border between the two and from there to t, so neither
    grows. Halves, quarters and so on down to single tokens have borders between all pairs.
    """
    num_tokens = k_YCNTM.shape[3]
    missing = (1 << (num_tokens - 1).bit_length()) - num_tokens
    before_axes = [(0, 0)] * 4
    a_ZYCNTM = jnp.pad(a_ZYCNTM, [*before_axes, (0, missing), (0, 0)])
    k_YCNTM = jnp.pad(k_YCNTM, [*before_axes, (0, missing), (0, 0)][1:])
    running_YCNTM = jnp.pad(running_YCNTM, [*before_axes, (0, missing), (0, 0)], mode="edge")

    def halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The first and second halves of blocks: [..., X blocks, size, M] each."""
        x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
        return x[..., 0, :, :], x[..., 1, :, :]

    pairs = jnp.sum(a_ZYCNTM * k_YCNTM, axis=-1)[..., None, None]  # [Z, Y, C, N, X, T, S]
    while (size := pairs.shape[-1]) < k_YCNTM.shape[3]:
        (_, later), (earlier, _) = halves(a_ZYCNTM, size), halves(k_YCNTM, size)
        running_earlier, running_later = halves(running_YCNTM, size)
        border = running_earlier[..., -1:, :]
        later *= jnp.exp(decays.between(running_later, border))
        earlier *= jnp.exp(decays.between(border, running_earlier))
        across = product("ZYCNXTM,YCNXSM->ZYCNXTS", later, earlier)
        first, second = pairs[..., ::2, :, :], pairs[..., 1::2, :, :]
        upper = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
        lower = jnp.concatenate([across, second], axis=-1)
        pairs = jnp.concatenate([upper, lower], axis=-2)
    return pairs[..., 0, :num_tokens, :num_tokens]
