"""Products with weights of few bits (`low_bit.py`): by XLA, which run anywhere, and where rows are
few by an accelerator's kernels; what has eight bits and a scale a row XLA expands within its own
products, of many rows and on TPUs.

Integers are multiplied in the activations' type, with float32 sums. Where a row has one scale it
comes after; where groups have them an element is its integer times its scale, and in kernels a
group's sum is weighed. `w8a8` and `w8a8_fp8` round each token's activations, too, by a scale of its
own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from configs.precision import FORMATS
from layers.backends import backends
from layers.kernels.linear import low_bit
from layers.kernels.linear.low_bit import Quantized
from layers.stacks import zeros

# Of what a CPU expands at once, in float32; whole rows, at least so many.
_BLOCK_BYTES, _BLOCK_ROWS = 1 << 20, 16
_LEAST_ROWS = 8  # of a product on a CPU: with fewer XLA sums in another order, or is slow


def product(x_TD: jax.Array, w: Quantized) -> jax.Array:
    """x w^T, float32 [T, F]; a row's bits do not depend on the others. Raises ValueError if x has
    other columns than w, or w is a stack.
    """
    if x_TD.ndim != 2 or len(w.shape) != 2 or x_TD.shape[1] != w.shape[1]:
        raise ValueError(f"{x_TD.shape} does not go with a matrix of {w.shape}")
    return _product(x_TD, w)


@jax.custom_vjp
def _product(x_TD: jax.Array, w: Quantized) -> jax.Array:
    if kernel := backends.current().skinny_product(x_TD.shape[0], w):
        return kernel(x_TD[None], w, None)[0]
    return _by_xla(x_TD, w)


def _product_forward(x_TD: jax.Array, w: Quantized) -> tuple[jax.Array, tuple[Any, ...]]:
    return _product(x_TD, w), (jnp.zeros(0, x_TD.dtype), w)


def _product_backward(residuals: tuple[Any, ...], y_TF: jax.Array) -> tuple[jax.Array, None]:
    # Without the barrier XLA would hold the matrix that the way forward expanded, to read it here.
    (like, w), y_TF = lax.optimization_barrier((residuals, y_TF))
    return _transposed(y_TF, w).astype(like.dtype), None


_product.defvjp(_product_forward, _product_backward)


def products(x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array) -> jax.Array:
    """Blocks of rows, each with one matrix of a stack [E, F, D]: float32 [B, W, F]; `matrix_B`
    (i32) of E is none, of the last blocks only, and these are arbitrary. Raises ValueError if x has
    other columns than w, or w is no stack.
    """
    if x_BWD.ndim != 3 or len(w.shape) != 3 or x_BWD.shape[2] != w.shape[2]:
        raise ValueError(f"{x_BWD.shape} does not go with a stack of {w.shape}")
    return _products(x_BWD, w, matrix_B)


@jax.custom_vjp
def _products(x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array) -> jax.Array:
    if kernel := backends.current().skinny_product(x_BWD.shape[1], w):
        return kernel(x_BWD, w, matrix_B)
    return _of_blocks(_by_xla, x_BWD, w, matrix_B, w.shape[1])


def _products_forward(
    x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _products(x_BWD, w, matrix_B), (jnp.zeros(0, x_BWD.dtype), w, matrix_B)


def _products_backward(
    residuals: tuple[Any, ...], y_BWF: jax.Array
) -> tuple[jax.Array, None, None]:
    (like, w, matrix_B), y_BWF = lax.optimization_barrier((residuals, y_BWF))
    x_BWD = _of_blocks(_transposed, y_BWF, w, matrix_B, w.shape[2])
    return x_BWD.astype(like.dtype), None, None


_products.defvjp(_products_forward, _products_backward)


def _of_blocks(
    multiply: Callable[[jax.Array, Quantized], jax.Array],
    x_BWX: jax.Array,
    w: Quantized,
    matrix_B: jax.Array,
    width: int,
) -> jax.Array:
    """Blocks of rows, each multiplied by its matrix of a stack: float32 [B, W, width]."""
    (B, W, _), E, backend = x_BWX.shape, w.shape[0], backends.current()

    def block_product(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_WX, e = block
        matrix = dataclasses.replace(jax.tree.map(lambda array: array[e], w), shape=w.shape[1:])
        return multiply(x_WX, matrix)

    def add_block(
        y_BWX: jax.Array, block: tuple[jax.Array, tuple[jax.Array, jax.Array]]
    ) -> tuple[jax.Array, None]:
        def nothing(_: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.zeros((W, width), jnp.float32)

        nth, operands = block
        y_WX = backend.where_needed(lambda: operands[1] < E, block_product, nothing, operands)
        return lax.dynamic_update_index_in_dim(y_BWX, y_WX, nth, 0), None

    empty_BWX = zeros((B, W, width), jnp.float32, matrix_B)
    return lax.scan(add_block, empty_BWX, (jnp.arange(B), (x_BWX, matrix_B)))[0]


def _by_xla(x_TD: jax.Array, w: Quantized) -> jax.Array:
    """`product`; a CPU expands blocks of rows, other devices what XLA does not expand itself."""
    T, F = len(x_TD), w.shape[0]
    is_rounded = FORMATS[w.format].activations is not None
    multiply = _times_rounded if is_rounded else _times
    backend = backends.current()
    least_rows = _LEAST_ROWS if backend.copies_in_blocks else backend.least_rows
    x_TD = jnp.pad(x_TD, ((0, max(0, least_rows - T)), (0, 0)))
    if not backend.copies_in_blocks:
        return multiply(x_TD, w)[:T]
    block_rows = _block_rows(w)
    y_TF = multiply(x_TD, w) if block_rows >= F else _by_blocks(x_TD, w, block_rows, multiply)
    return y_TF[:T]


def _transposed(y_TF: jax.Array, w: Quantized) -> jax.Array:
    """y w, the gradient of the activations for that of their product, float32 [T, D]; expands what
    `_by_xla` does.
    """
    F, D = w.shape
    block_rows = _block_rows(w)
    if not backends.current().copies_in_blocks or block_rows >= F:
        return _times_transposed(y_TF, w)
    scale_GF, row_X = low_bit.of_rows(w), jnp.arange(block_rows)

    def add_block(n: jax.Array, x_TD: jax.Array) -> jax.Array:
        first = jnp.minimum(n * block_rows, F - block_rows)
        y_TX = lax.dynamic_slice_in_dim(y_TF, first, block_rows, 1)
        y_TX = jnp.where(first + row_X >= n * block_rows, y_TX, 0)  # the last are partly added
        return x_TD + _times_transposed(y_TX, _rows(w, scale_GF, first, block_rows))

    return lax.fori_loop(0, -(-F // block_rows), add_block, jnp.zeros((len(y_TF), D), jnp.float32))


def _block_rows(w: Quantized) -> int:
    """Rows of a matrix that a CPU expands at once."""
    return max(_BLOCK_ROWS, _BLOCK_BYTES // (4 * w.shape[1]))


def _by_blocks(
    x_TD: jax.Array, w: Quantized, block_rows: int, multiply: Callable[..., jax.Array]
) -> jax.Array:
    """Products with so many rows of the matrix at a time; the last are partly those before."""
    F, scale_GF = w.shape[0], low_bit.of_rows(w)

    def add_block(n: jax.Array, y_TF: jax.Array) -> jax.Array:
        first = jnp.minimum(n * block_rows, F - block_rows)
        y_TX = multiply(x_TD, _rows(w, scale_GF, first, block_rows))
        return lax.dynamic_update_slice_in_dim(y_TF, y_TX, first, 1)

    return lax.fori_loop(0, -(-F // block_rows), add_block, jnp.zeros((len(x_TD), F), jnp.float32))


def _rows(w: Quantized, scale_GF: jax.Array, first: jax.Array, count: int) -> Quantized:
    """So many rows of a matrix, whose scales of each row are `scale_GF`."""

    def some(axis: int) -> Callable[[jax.Array], jax.Array]:
        return lambda array: lax.dynamic_slice_in_dim(array, first, count, axis)

    return dataclasses.replace(
        w, data=some(0)(w.data), scale=some(1)(scale_GF), zero=jax.tree.map(some(1), w.zero),
        row=jax.tree.map(some(0), w.row),
    )  # fmt: skip


def _times(x_TD: jax.Array, w: Quantized) -> jax.Array:
    x_TD = x_TD.astype(w.dtype)
    if FORMATS[w.format].bits == 8 and FORMATS[w.format].group is None:
        return _dot(x_TD, low_bit.elements(w).astype(w.dtype)) * w.scale
    matrix_FD = backends.current().expanded(w)
    return _dot(x_TD, low_bit.numbers(w).astype(w.dtype) if matrix_FD is None else matrix_FD)


def _times_transposed(y_TF: jax.Array, w: Quantized) -> jax.Array:
    """The transpose of `_times`."""
    if FORMATS[w.format].bits == 8 and FORMATS[w.format].group is None:
        y_TF, matrix_FD = y_TF * w.scale, low_bit.elements(w).astype(w.dtype)
    else:
        expanded_FD = backends.current().expanded(w)
        matrix_FD = low_bit.numbers(w).astype(w.dtype) if expanded_FD is None else expanded_FD
    exact = lax.Precision.HIGHEST if w.dtype == "float32" else None  # as `_dot`
    return lax.dot_general(
        y_TF, matrix_FD, (((1,), (0,)), ((), ())), precision=exact,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _times_rounded(x_TD: jax.Array, w: Quantized) -> jax.Array:
    """Activations of the weights' eight bits."""
    q_FD = low_bit.elements(w)
    q_TD, scale_T1 = low_bit.rounded_tokens(x_TD, q_FD.dtype)
    if q_FD.dtype != jnp.int8 and not backends.current().multiplies_all_types:
        q_TD, q_FD = q_TD.astype(jnp.float32), q_FD.astype(jnp.float32)
    return _dot(q_TD, q_FD).astype(jnp.float32) * scale_T1 * w.scale


def _dot(x_TD: jax.Array, w_FD: jax.Array) -> jax.Array:
    is_int = x_TD.dtype == jnp.int8
    # A GPU's default for float32 operands is TF32, ten bits of mantissa.
    exact = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    return lax.dot_general(
        x_TD, w_FD, (((1,), (1,)), ((), ())), precision=exact,
        preferred_element_type=jnp.int32 if is_int else jnp.float32,
    )  # fmt: skip
