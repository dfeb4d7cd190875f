"""S4D (Gu et al. 2022, arXiv 2206.11893), a constant diagonal recurrence of complex states:
h_t = a h_(t-1) + B x_t, out_t = 2 Re(C h_t), every channel by itself.

M is the number of complex elements: conjugate pairs, of which one each is kept. States are real
arrays [..., 2, M, X], as channels are what vectors and lanes are full of; `log_a` is complex with a
real part < 0 (of a continuous A it is dt A). As all tokens decay the state alike, padding must be
named.
"""

import functools

import jax
import jax.numpy as jnp

from layers.backends import backends
from layers.recurrence import order
from layers.recurrence.sums import product, rounded


def recurrent(
    x_YWX: jax.Array,
    log_a_MX: jax.Array,
    B_MX: jax.Array,
    C_MX: jax.Array,
    before_Y2MX: jax.Array,
    is_valid_YW: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Token by token: outputs float32 [Y, W, X] and the states after each, [Y, W, 2, M, X]. On a
    CPU a token's bits depend on neither Y, W nor where a row was split. Tokens of padding, where
    `is_valid_YW` is False, leave the state as it was.
    """
    a_MX, C_MX = jnp.exp(log_a_MX), 2 * C_MX
    ones_YM = jnp.ones((len(x_YWX), len(a_MX)))

    def step(state_Y2MX: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_Y1X, is_valid_Y = token
        real, imag = state_Y2MX[:, 0], state_Y2MX[:, 1]
        real, imag = (
            rounded(a_MX.real * real) - rounded(a_MX.imag * imag) + rounded(B_MX.real * x_Y1X),
            rounded(a_MX.real * imag) + rounded(a_MX.imag * real) + rounded(B_MX.imag * x_Y1X),
        )
        real_YMX = rounded(C_MX.real * real) - rounded(C_MX.imag * imag)
        after_Y2MX = jnp.stack([real, imag], axis=1)
        after_Y2MX = jnp.where(is_valid_Y[:, None, None, None], after_Y2MX, state_Y2MX)
        return after_Y2MX, product("YM,YMX->YX", ones_YM, real_YMX)

    if is_valid_YW is None:
        is_valid_YW = jnp.ones(x_YWX.shape[:2], bool)
    return order.by_token(step, before_Y2MX, (x_YWX[:, :, None], is_valid_YW))


def chunked(
    x_YWX: jax.Array,
    log_a_MX: jax.Array,
    B_MX: jax.Array,
    C_MX: jax.Array,
    before_Y2MX: jax.Array,
    is_valid_YW: jax.Array | None = None,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)), a product with powers of a within; a CPU, to which
    powers cost more than tokens, goes through a chunk as `recurrent`. Outputs float32 [Y, W, X] and
    the states after every chunk, [Y, C, 2, M, X]. Behind padding a chunk has no further tokens.
    `resumes` (of a single row, else InputError) as for `order.by_chunk`.
    """
    num_tokens = x_YWX.shape[1]
    size = min(chunk, num_tokens)
    if is_valid_YW is None:
        is_valid_YW = jnp.ones(x_YWX.shape[:2], bool)
    x_YCTX = order.in_chunks(x_YWX, size)
    is_valid_YCT = order.in_chunks(is_valid_YW, size)
    if backends.current().scans_by_token:

        @functools.partial(jax.checkpoint, prevent_cse=False)  # a chunk's states at a time
        def feed(
            state_Y2MX: jax.Array, inputs: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, jax.Array]:
            x_YTX, is_valid_YT = inputs
            out_YTX, after = recurrent(x_YTX, log_a_MX, B_MX, C_MX, state_Y2MX, is_valid_YT)
            return after[:, -1], out_YTX

        inputs = x_YCTX, is_valid_YCT
        out_YCTX, after_YC2MX = order.by_chunk(feed, before_Y2MX, inputs, resumes)
        return order.in_rows(out_YCTX, num_tokens), after_YC2MX
    length_YC = is_valid_YCT.sum(axis=2)

    powers_TMX = _powers(log_a_MX, size + 1)
    kernel_TX = _kernel(powers_TMX[:-1], B_MX, C_MX)
    lag_TS = jnp.arange(size)[:, None] - jnp.arange(size)
    kernel_TSX = jnp.where(lag_TS[..., None] >= 0, kernel_TX[lag_TS], 0)
    out_YCTX = product("TSX,YCSX->YCTX", kernel_TSX, x_YCTX)

    # Where the last valid tokens of all chunks lie side by side, one set of powers fits all.
    source_YCT = jnp.arange(size) - size + length_YC[..., None]
    last_YCTX = jnp.take_along_axis(x_YCTX, jnp.maximum(source_YCT, 0)[..., None], axis=2)
    last_YCTX = jnp.where(source_YCT[..., None] >= 0, last_YCTX, 0)
    to_end_T2MX = _parts(B_MX * powers_TMX[-2::-1])
    added_YC2MX = product("YCTX,TZMX->YCZMX", last_YCTX, to_end_T2MX)

    def step(state_Y2MX: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        length_Y, added_Y2MX = inputs
        state_YMX = jax.lax.complex(state_Y2MX[:, 0], state_Y2MX[:, 1])
        after_YMX = state_YMX * jnp.exp(length_Y[:, None, None] * log_a_MX)
        return _parts(after_YMX) + added_Y2MX, state_Y2MX

    inputs = length_YC, added_YC2MX
    before_YC2MX, after_YC2MX = order.by_chunk(step, before_Y2MX, inputs, resumes)
    read_T2MX = _parts(jnp.conj(2 * C_MX * powers_TMX[1:]))  # Re(c h) = Re c Re h - Im c Im h
    out_YCTX += product("TZMX,YCZMX->YCTX", read_T2MX, before_YC2MX)
    return order.in_rows(out_YCTX, num_tokens), after_YC2MX


def convolved(x_YWX: jax.Array, log_a_MX: jax.Array, B_MX: jax.Array, C_MX: jax.Array) -> jax.Array:
    """Whole rows from zero as one convolution by Fourier transforms: float32 [Y, W, X]."""
    num_tokens = x_YWX.shape[1]
    kernel_WX = _kernel(_powers(log_a_MX, num_tokens), B_MX, C_MX)
    padded = 2 * num_tokens  # or the end of a row would reach its beginning
    transformed = jnp.fft.rfft(x_YWX, padded, axis=1) * jnp.fft.rfft(kernel_WX, padded, axis=0)
    return jnp.fft.irfft(transformed, padded, axis=1)[:, :num_tokens]


def _powers(log_a_MX: jax.Array, count: int) -> jax.Array:
    """a^0, a^1, .., complex64 [count, M, X]."""
    return jnp.exp(jnp.arange(count)[:, None, None] * log_a_MX)


def _kernel(powers_TMX: jax.Array, B_MX: jax.Array, C_MX: jax.Array) -> jax.Array:
    """What an input adds to the output T tokens later, float32 [T, X]."""
    return (2 * B_MX * C_MX * powers_TMX).real.sum(axis=1)


def _parts(x: jax.Array) -> jax.Array:
    return jnp.stack([x.real, x.imag], axis=-3)
