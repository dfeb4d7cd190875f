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
    """Token by token: outputs float32 [Y, W, N, H] and the states after each, [Y, W, N, M, H]. On a
    CPU a token's bits depend on neither Y, W nor where a row was split. `log_decay` is <= 0,
    [Y, W, N] or [Y, W, N, M].
    """

    def step(state_YNMH: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
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
    2406.06484): a triangular system gives what each token of a chunk writes. Outputs float32
    [Y, W, N, H] and the states after every chunk, [Y, C, N, M, H]; `log_decay` as for `recurrent`,
    `resumes` (of a single row, else InputError) as for `order.by_chunk`.
    """
    num_tokens, width = v_YWNH.shape[1], v_YWNH.shape[3]

    def heads_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(order.in_chunks(x, min(chunk, num_tokens)), 2, 3)

    q_YCNTM, k_YCNTM, v_YCNTH = heads_first(q_YWNM), heads_first(k_YWNM), heads_first(v_YWNH)
    beta_YCNT1 = heads_first(beta_YWN)[..., None]
    running_YCNTX = decays.running(heads_first(_by_channel(log_decay)))
    from_start_YCNTX = jnp.exp(decays.between(running_YCNTX))
    to_end_YCNTX = jnp.exp(decays.between(running_YCNTX[..., -1:, :], running_YCNTX))

    # With u_t what token t writes at its key: (1 + A) u = beta (v - k S), A the pairs of keys.
    pairs = _pairs if log_decay.ndim == 3 else _pairs_by_channel
    system_YCNTS = pairs(beta_YCNT1 * k_YCNTM, k_YCNTM, running_YCNTX)
    right_YCNTX = jnp.concatenate([v_YCNTH, k_YCNTM * from_start_YCNTX], axis=-1) * beta_YCNT1
    inverse_YCNTS = _inverse(_one_batch(system_YCNTS)).reshape(system_YCNTS.shape)
    solved_YCNTX = product("YCNTS,YCNSX->YCNTX", inverse_YCNTS, right_YCNTX)
    value_YCNTH, removed_YCNTM = solved_YCNTX[..., :width], solved_YCNTX[..., width:]

    def step(
        state_YNMH: jax.Array, inputs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value_YNTH, removed_YNTM, k_YNTM, decay_YNX = inputs
        change_YNTH = value_YNTH - product("YNTM,YNMH->YNTH", removed_YNTM, state_YNMH)
        added_YNMH = product("YNTM,YNTH->YNMH", k_YNTM, change_YNTH)
        return decay_YNX[..., None] * state_YNMH + added_YNMH, (state_YNMH, change_YNTH)

    decay_YCNX = from_start_YCNTX[:, :, :, -1]
    inputs = value_YCNTH, removed_YCNTM, k_YCNTM * to_end_YCNTX, decay_YCNX
    (before_YCNMH, change_YCNTH), after_YCNMH = order.by_chunk(step, before_YNMH, inputs, resumes)
    out_YCNTH = product("YCNTM,YCNMH->YCNTH", q_YCNTM * from_start_YCNTX, before_YCNMH)
    own_pairs_YCNTS = pairs(q_YCNTM, k_YCNTM, running_YCNTX)
    out_YCNTH += product("YCNTS,YCNSH->YCNTH", own_pairs_YCNTS, change_YCNTH)
    return order.in_rows(jnp.moveaxis(out_YCNTH, 3, 2), num_tokens), after_YCNMH


def _by_channel(log_decay: jax.Array) -> jax.Array:
    """[Y, W, N, X] with X = M, or 1 for all channels."""
    return log_decay if log_decay.ndim == 4 else log_decay[..., None]


def _pairs(a_YCNTM: jax.Array, k_YCNTM: jax.Array, running_YCNT1: jax.Array) -> jax.Array:
    """a_t k_s exp(g_(s+1) + .. + g_t) of s <= t within a chunk, else 0: f32[Y, C, N, T, S]."""
    log_YCNTS = decays.between(running_YCNT1, jnp.swapaxes(running_YCNT1, -1, -2))
    is_past_TS = jnp.tri(k_YCNTM.shape[3], dtype=bool)
    decay_YCNTS = jnp.exp(jnp.where(is_past_TS, log_YCNTS, -jnp.inf))
    return product("YCNTM,YCNSM->YCNTS", a_YCNTM, k_YCNTM) * decay_YCNTS


def _pairs_by_channel(a_YCNTM: jax.Array, k_YCNTM: jax.Array, running: jax.Array) -> jax.Array:
    """`_pairs` with a decay a channel, which no longer is a factor of the product."""
    a_ZTM, k_ZTM = _one_batch(a_YCNTM), _one_batch(k_YCNTM)
    running_ZTM = running.reshape(2, *k_ZTM.shape)
    pairs_ZTS = _pairs_by_halves(a_ZTM, k_ZTM, running_ZTM)
    return pairs_ZTS.reshape(*a_YCNTM.shape[:-1], -1)


def _pairs_by_halves(a_ZTM: jax.Array, k_ZTM: jax.Array, running_ZTM: jax.Array) -> jax.Array:
    """A decay is one of either side, from s up to a border between the two and from there to t, so
    neither grows. Halves, quarters and so on down to single tokens have borders between all pairs.
    """
    size = a_ZTM.shape[1]
    if size == 1:
        return jnp.sum(a_ZTM * k_ZTM, axis=-1, keepdims=True)
    if size % 2:
        one_more = [(0, 0), (0, 1), (0, 0)]
        a_ZTM, k_ZTM = jnp.pad(a_ZTM, one_more), jnp.pad(k_ZTM, one_more)
        running_ZTM = jnp.pad(running_ZTM, [(0, 0), *one_more], mode="edge")
        return _pairs_by_halves(a_ZTM, k_ZTM, running_ZTM)[:, :size, :size]
    (a_1, a_2), (k_1, k_2) = jnp.split(a_ZTM, 2, axis=1), jnp.split(k_ZTM, 2, axis=1)
    running_1, running_2 = jnp.split(running_ZTM, 2, axis=2)
    border = running_1[:, :, -1:]
    later = a_2 * jnp.exp(decays.between(running_2, border))
    earlier = k_1 * jnp.exp(decays.between(border, running_1))
    across = product("ZTM,ZSM->ZTS", later, earlier)
    within = _pairs_by_halves(
        jnp.concatenate([a_1, a_2]),
        jnp.concatenate([k_1, k_2]),
        jnp.concatenate([running_1, running_2], axis=1),
    )
    return _triangle(within, across)


def _inverse(x_ZTS: jax.Array) -> jax.Array:
    """Inverts matrices whose diagonal counts as 1, and what is above it as 0; by halves, as every
    device is fast at products, and LAPACK's threads wait for each other.
    """
    size = x_ZTS.shape[1]
    if size == 1:
        return jnp.ones_like(x_ZTS)
    if size % 2:
        x_ZTS = jnp.pad(x_ZTS, [(0, 0), (0, 1), (0, 1)])
        return _inverse(x_ZTS)[:, :size, :size]
    half = size // 2
    both = jnp.concatenate([x_ZTS[:, :half, :half], x_ZTS[:, half:, half:]])
    within = _inverse(both)
    first, second = jnp.split(within, 2)
    across = product("ZTS,ZSX->ZTX", second, product("ZTS,ZSX->ZTX", x_ZTS[:, half:, :half], first))
    return _triangle(within, -across)


def _one_batch(x_YCN: jax.Array) -> jax.Array:
    """[Y, C, N, ...] -> [Z, ...]; XLA's CPU backend ends the process at eight axes."""
    return x_YCN.reshape(-1, *x_YCN.shape[3:])


def _triangle(within: jax.Array, across: jax.Array) -> jax.Array:
    """Matrices of the blocks on the diagonal, all first and then all second ones, and below it."""
    first, second = jnp.split(within, 2)
    upper = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([across, second], axis=-1)], axis=-2)
