"""Selective scan of Mamba (Gu & Dao 2023, arXiv 2312.00752), every channel by itself:
h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, out_t = C_t h_t.

A token whose dt is 0 leaves the state as it was.
"""

import jax
import jax.numpy as jnp

from layers.recurrence import order
from layers.recurrence.sums import product, rounded
from layers.reduce import row_sum


def recurrent(
    x_YWX: jax.Array,
    dt_YWX: jax.Array,
    A_XM: jax.Array,
    B_YWM: jax.Array,
    C_YWM: jax.Array,
    before_YXM: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token; on a CPU a token's bits depend on neither Y, W nor where a row was split.

    Args:
        dt_YWX: >= 0.
        A_XM: < 0.

    Returns:
        Outputs float32 [Y, W, X] and the states after every token, float32 [Y, W, X, M].
    """

    def step(state_YXM: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        x_YX, dt_YX, B_YM, C_YM = token
        decay_YXM = jnp.exp(dt_YX[..., None] * A_XM)
        added_YXM = (dt_YX * x_YX)[..., None] * B_YM[:, None]
        state_YXM = rounded(decay_YXM * state_YXM) + rounded(added_YXM)
        return state_YXM, row_sum(rounded(state_YXM * C_YM[:, None]))[..., 0]

    return order.by_token(step, before_YXM, (x_YWX, dt_YWX, B_YWM, C_YWM))


def chunked(
    x_YWX: jax.Array,
    dt_YWX: jax.Array,
    A_XM: jax.Array,
    B_YWM: jax.Array,
    C_YWM: jax.Array,
    before_YXM: jax.Array,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)), an associative scan within: as every channel decays by
    itself there is no product to make of a chunk, and only one chunk's states exist at a time.

    Args:
        dt_YWX: >= 0.
        A_XM: < 0.
        resumes: bool [C] and float32 [C, X, M]: the chunks of a single row that begin with a state
            of their own.

    Returns:
        Outputs float32 [Y, W, X] and the states after every chunk, float32 [Y, C, X, M].

    Raises:
        InputError: There are several rows to resume in.
    """
    num_tokens = x_YWX.shape[1]

    def later(first: tuple, second: tuple) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def step(state_YXM: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        x_YTX, dt_YTX, B_YTM, C_YTM = inputs
        decay_YTXM = jnp.exp(dt_YTX[..., None] * A_XM)
        added_YTXM = (dt_YTX * x_YTX)[..., None] * B_YTM[:, :, None]
        decay_YTXM, added_YTXM = jax.lax.associative_scan(later, (decay_YTXM, added_YTXM), axis=1)
        states_YTXM = decay_YTXM * state_YXM[:, None] + added_YTXM
        return states_YTXM[:, -1], product("YTXM,YTM->YTX", states_YTXM, C_YTM)

    size = min(chunk, num_tokens)
    inputs = tuple(order.in_chunks(x, size) for x in (x_YWX, dt_YWX, B_YWM, C_YWM))
    out_YCTX, after_YCXM = order.by_chunk(step, before_YXM, inputs, resumes)
    return order.in_rows(out_YCTX, num_tokens), after_YCXM
