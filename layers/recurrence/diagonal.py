"""Selective scan of Mamba (Gu & Dao 2023, arXiv 2312.00752), every channel by itself:
h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, out_t = C_t h_t.

A token whose dt is 0 leaves the state as it was. Channels are a state's last axis: vectors of a CPU
and lanes of a TPU are full of them, whatever M is.
"""

import functools

import jax
import jax.numpy as jnp

from layers.backends import backends
from layers.recurrence import order
from layers.recurrence.sums import product, rounded


def recurrent(
    x_YWX: jax.Array,
    dt_YWX: jax.Array,
    A_MX: jax.Array,
    B_YWM: jax.Array,
    C_YWM: jax.Array,
    before_YMX: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token: outputs float32 [Y, W, X] and the states after each, [Y, W, M, X]. On a CPU a
    token's bits depend on neither Y, W nor where a row was split. `dt_YWX` is >= 0, `A_MX` < 0.
    """

    def step(state_YMX: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_YX, dt_YX, B_YM, C_YM = token
        decay_YMX = jnp.exp(dt_YX[:, None] * A_MX)
        added_YMX = (dt_YX * x_YX)[:, None] * B_YM[..., None]
        state_YMX = rounded(decay_YMX * state_YMX) + rounded(added_YMX)
        return state_YMX, product("YM,YMX->YX", C_YM, state_YMX)

    return order.by_token(step, before_YMX, (x_YWX, dt_YWX, B_YWM, C_YWM))


def chunked(
    x_YWX: jax.Array,
    dt_YWX: jax.Array,
    A_MX: jax.Array,
    B_YWM: jax.Array,
    C_YWM: jax.Array,
    before_YMX: jax.Array,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)): outputs float32 [Y, W, X] and the states after every
    chunk, [Y, C, M, X]. Only one chunk's states exist at a time, with gradients too.

    Every channel decays by itself, so a chunk is no product: a CPU goes through it token by token,
    other devices by an associative scan, with several times the work in fewer steps. `resumes` (of
    a single row, else InputError) as for `order.by_chunk`.
    """
    num_tokens = x_YWX.shape[1]

    def later(
        first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    # A loop's body shares nothing with what surrounds it, so there is nothing to prevent.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state_YMX: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_YTX, dt_YTX, B_YTM, C_YTM = inputs
        if backends.current().scans_by_token:
            out_YTX, states_YTMX = recurrent(x_YTX, dt_YTX, A_MX, B_YTM, C_YTM, state_YMX)
            return states_YTMX[:, -1], out_YTX
        decay_YTMX = jnp.exp(dt_YTX[:, :, None] * A_MX)
        added_YTMX = (dt_YTX * x_YTX)[:, :, None] * B_YTM[..., None]
        decay_YTMX, added_YTMX = jax.lax.associative_scan(later, (decay_YTMX, added_YTMX), axis=1)
        states_YTMX = decay_YTMX * state_YMX[:, None] + added_YTMX
        return states_YTMX[:, -1], product("YTM,YTMX->YTX", C_YTM, states_YTMX)

    size = min(chunk, num_tokens)
    inputs = tuple(order.in_chunks(x, size) for x in (x_YWX, dt_YWX, B_YWM, C_YWM))
    out_YCTX, after_YCMX = order.by_chunk(step, before_YMX, inputs, resumes)
    return order.in_rows(out_YCTX, num_tokens), after_YCMX
