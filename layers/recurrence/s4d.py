"""S4D (Gu et al. 2022, arXiv 2206.11893), a constant diagonal recurrence of complex states:
h_t = a h_(t-1) + B x_t, out_t = 2 Re(C h_t), every channel by itself.

M is the number of complex elements: conjugate pairs, of which one each is kept. States are real
arrays [..., M, 2]; `log_a` is complex with a real part < 0 (of a continuous A it is dt A). As all
tokens decay the state alike, padding must be named.
"""

import jax
import jax.numpy as jnp

from layers.recurrence import order
from layers.recurrence.sums import product, rounded
from layers.reduce import row_sum


def recurrent(
    x_YWX: jax.Array,
    log_a_XM: jax.Array,
    B_XM: jax.Array,
    C_XM: jax.Array,
    before_YXM2: jax.Array,
    is_valid_YW: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Token by token; on a CPU a token's bits depend on neither Y, W nor where a row was split.

    Args:
        is_valid_YW: False where a token is padding and leaves the state as it was.

    Returns:
        Outputs float32 [Y, W, X] and the states after every token, float32 [Y, W, X, M, 2].
    """
    a_XM, C_XM = jnp.exp(log_a_XM), 2 * C_XM

    def step(state_YXM2: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        x_YX1, is_valid_Y = token
        real, imag = state_YXM2[..., 0], state_YXM2[..., 1]
        real, imag = (
            rounded(a_XM.real * real) - rounded(a_XM.imag * imag) + rounded(B_XM.real * x_YX1),
            rounded(a_XM.real * imag) + rounded(a_XM.imag * real) + rounded(B_XM.imag * x_YX1),
        )
        out_YX1 = row_sum(rounded(C_XM.real * real) - rounded(C_XM.imag * imag))
        after_YXM2 = jnp.stack([real, imag], axis=-1)
        after_YXM2 = jnp.where(is_valid_Y[:, None, None, None], after_YXM2, state_YXM2)
        return after_YXM2, out_YX1[..., 0]

    if is_valid_YW is None:
        is_valid_YW = jnp.ones(x_YWX.shape[:2], bool)
    return order.by_token(step, before_YXM2, (x_YWX[..., None], is_valid_YW))


def chunked(
    x_YWX: jax.Array,
    log_a_XM: jax.Array,
    B_XM: jax.Array,
    C_XM: jax.Array,
    before_YXM2: jax.Array,
    is_valid_YW: jax.Array | None = None,
    resumes: order.Resumes | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk (C = ceil(W / chunk)), a product with powers of a within.

    Args:
        is_valid_YW: False where a token is padding and leaves the state as it was; behind padding
            its chunk has no further tokens.
        resumes: bool [C] and float32 [C, X, M, 2]: the chunks of a single row that begin with a
            state of their own.

    Returns:
        Outputs float32 [Y, W, X] and the states after every chunk, float32 [Y, C, X, M, 2].

    Raises:
        InputError: There are several rows to resume in.
    """
    num_tokens = x_YWX.shape[1]
    size = min(chunk, num_tokens)
    if is_valid_YW is None:
        is_valid_YW = jnp.ones(x_YWX.shape[:2], bool)
    x_YCTX = order.in_chunks(x_YWX, size)
    is_valid_YCT = order.in_chunks(is_valid_YW, size)
    length_YC = is_valid_YCT.sum(axis=2)

    powers_TXM = _powers(log_a_XM, size + 1)
    kernel_TX = _kernel(powers_TXM[:-1], B_XM, C_XM)
    lag_TS = jnp.arange(size)[:, None] - jnp.arange(size)
    kernel_TSX = jnp.where(lag_TS[..., None] >= 0, kernel_TX[lag_TS], 0)
    out_YCTX = product("TSX,YCSX->YCTX", kernel_TSX, x_YCTX)

    # Where the last valid tokens of all chunks lie side by side, one set of powers fits all.
    source_YCT = jnp.arange(size) - size + length_YC[..., None]
    last_YCTX = jnp.take_along_axis(x_YCTX, jnp.maximum(source_YCT, 0)[..., None], axis=2)
    last_YCTX = jnp.where(source_YCT[..., None] >= 0, last_YCTX, 0)
    to_end_TXM2 = _parts(B_XM * powers_TXM[-2::-1])
    added_YCXM2 = product("YCTX,TXMZ->YCXMZ", last_YCTX, to_end_TXM2)

    def step(state_YXM2: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        length_Y, added_YXM2 = inputs
        state_YXM = jax.lax.complex(state_YXM2[..., 0], state_YXM2[..., 1])
        after_YXM = state_YXM * jnp.exp(length_Y[:, None, None] * log_a_XM)
        return _parts(after_YXM) + added_YXM2, state_YXM2

    inputs = length_YC, added_YCXM2
    before_YCXM2, after_YCXM2 = order.by_chunk(step, before_YXM2, inputs, resumes)
    read_TXM2 = _parts(jnp.conj(2 * C_XM * powers_TXM[1:]))  # Re(c h) = Re c Re h - Im c Im h
    out_YCTX += product("TXMZ,YCXMZ->YCTX", read_TXM2, before_YCXM2)
    return order.in_rows(out_YCTX, num_tokens), after_YCXM2


def convolved(x_YWX: jax.Array, log_a_XM: jax.Array, B_XM: jax.Array, C_XM: jax.Array) -> jax.Array:
    """Whole rows that begin at zero, as one long convolution by Fourier transforms: float32
    [Y, W, X].
    """
    num_tokens = x_YWX.shape[1]
    kernel_WX = _kernel(_powers(log_a_XM, num_tokens), B_XM, C_XM)
    padded = 2 * num_tokens  # or the end of a row would reach its beginning
    transformed = jnp.fft.rfft(x_YWX, padded, axis=1) * jnp.fft.rfft(kernel_WX, padded, axis=0)
    return jnp.fft.irfft(transformed, padded, axis=1)[:, :num_tokens]


def _powers(log_a_XM: jax.Array, count: int) -> jax.Array:
    """a^0, a^1, .., complex64 [count, X, M]."""
    return jnp.exp(jnp.arange(count)[:, None, None] * log_a_XM)


def _kernel(powers_TXM: jax.Array, B_XM: jax.Array, C_XM: jax.Array) -> jax.Array:
    """What an input adds to the output T tokens later, float32 [T, X]."""
    return (2 * B_XM * C_XM * powers_TXM).real.sum(axis=-1)


def _parts(x: jax.Array) -> jax.Array:
    """Real and imaginary part, [..., 2]."""
    return jnp.stack([x.real, x.imag], axis=-1)
