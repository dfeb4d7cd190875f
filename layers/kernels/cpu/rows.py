"""What a step computes of rows beside products and attention, by the native library: each row is
read in one order, whatever lies beside it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from layers.kernels.cpu import calls, library

GROUP = 128  # entries that one of the maxima stands for (src/row_kernels.h)
GATES = {"silu": 0, "gelu_tanh": 1}


def norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float, offset: float = 0.0
) -> jax.Array:
    """RMSNorm, or with a bias LayerNorm, over the last axis: float32 of x's shape. x is float32,
    the weight (plus `offset`) and bias are float32 or bfloat16, [X].
    """
    bias = jnp.zeros(0, weight.dtype) if bias is None else bias
    dtype = jnp.promote_types(weight.dtype, bias.dtype)
    arrays = x, weight.astype(dtype), bias.astype(dtype)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return calls.call(
        library.NORM, out, *arrays, epsilon=np.float32(eps), offset=np.float32(offset)
    )


def gate(gate_up_TX: jax.Array, activation: str, dtype: str) -> jax.Array:
    """act(gate) up, [T, F] of `dtype`, of float32 [T, 2 F], gates first; the activation is 'silu'
    or 'gelu_tanh' (else KeyError), `dtype` 'float32' or 'bfloat16'.
    """
    T, X = gate_up_TX.shape
    out = jax.ShapeDtypeStruct((T, X // 2), jnp.dtype(dtype))
    code = np.int32(GATES[activation])
    return calls.call(library.GATE, out, gate_up_TX, activation=code)


def summarize(x_QV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of float32 rows, read once: the maxima of groups of `GROUP` entries, the last may be shorter,
    [Q, ceil(V / GROUP)]; the first of the largest entries, i32[Q]; log of the sum of exp, [Q].
    """
    Q, V = x_QV.shape
    outs = (
        jax.ShapeDtypeStruct((Q, -(-V // GROUP)), jnp.float32),
        jax.ShapeDtypeStruct((Q,), jnp.int32),
        jax.ShapeDtypeStruct((Q,), jnp.float32),
    )
    return calls.call(library.SUMMARIZE, outs, x_QV)


def append(
    qkv_TX: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    place: tuple[jax.Array, jax.Array],
    pages: jax.Array,
    *,
    shape: tuple[int, int, int],
    dtype: str,
    scale: float,
    eps: float = 0.0,
    offset: float = 0.0,
    bias_X: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Queries for attention, of `dtype` [T, N, H], and the pages with the keys and values of their
    tokens, in place where `pages` is donated. Queries and keys are normed, if they have norms, and
    rotated as `rope.rotate` does; non-finite values are written as `packed_row` has them.

    Args:
        qkv_TX: float32 [T, (N + 2 K) H]: queries, keys and values, as their product leaves them.
        angles: cos and sin, float32 [T, X], of the pairs that rotate.
        norms: weights of RMSNorm of each query and each key head, [H].
        place: page and offset of each token, i32[T]; padding has page 0: nothing is written, and
            queries are 0.
        pages: [pages, page tokens, 2 K H], of `dtype` as pages store it.
        shape: N, K and H.
        scale: of queries.
        bias_X: of the product.
    """
    N, K, H = shape
    if bias_X is not None:
        qkv_TX = qkv_TX + bias_X.astype(jnp.float32)
    norms = (jnp.zeros(0), jnp.zeros(0)) if norms is None else norms
    queries = jax.ShapeDtypeStruct((qkv_TX.shape[0], N, H), jnp.dtype(dtype))
    outs = queries, jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    return calls.call(
        library.APPEND, outs, qkv_TX, *angles, *norms, *place, pages, in_place={7: 1},
        kv_heads=np.int64(K), epsilon=np.float32(eps), offset=np.float32(offset),
        scale=np.float32(scale),
    )  # fmt: skip


def choose(
    scores_YWX: jax.Array, open_YWX: jax.Array, max_chosen: int
) -> tuple[jax.Array, jax.Array]:
    """The largest open scores, the first of equals: their indices in rising order, i32 [..., most],
    then X; and their number, i32 [...]. Scores are float32 in XLA's order, where NaN is the largest
    and -NaN the smallest.
    """
    shape = scores_YWX.shape[:-1]
    outs = (
        jax.ShapeDtypeStruct((*shape, max_chosen), jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
    )
    return calls.call(library.CHOOSE, outs, scores_YWX, open_YWX)


def zeros(out: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros, which take memory only where they are written to."""
    return calls.call(library.ZEROS, out)
