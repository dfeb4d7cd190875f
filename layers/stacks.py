"""Products with stacks of matrices [E, F, D]: each row with one of them (experts), or each row with
all of them (heads).
"""

import jax
import jax.numpy as jnp

from layers.kernels.device import target_device, target_is_cpu
from layers.kernels.linear import grouped, low_bit_product, packed
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.observed import Observed
from layers.kernels.linear.packed import Packed
from layers.linear import Leaf
from layers.params import looked_up

# Rows of a block on a CPU: with fewer, XLA's products are slow or sum in another order; with more,
# experts that few rows visit are mostly padding.
_LEAST_ROWS, _STEADY_ROWS, _MOST_ROWS = 2, 16, 64


def grouped_linear(
    x_XD: jax.Array, w_EFD: Leaf, sizes_E: jax.Array, deterministic: bool
) -> jax.Array:
    """Rows in groups, one behind the other, times each group's own matrix: float32 [X, F], 0 behind
    the last group.

    Args:
        x_XD: rows, sorted by group.
        w_EFD: a matrix [F, D] a group.
        sizes_E: i32[E], rows of each group.
        deterministic: a row's bits do not depend on the others.
    """
    if isinstance(w_EFD, Packed):
        return packed.grouped_product(x_XD, w_EFD, sizes_E)
    if isinstance(w_EFD, Quantized):
        return _in_blocks(x_XD, w_EFD, sizes_E, deterministic)
    if isinstance(w_EFD, Observed):
        w_EFD.note(x_XD, sizes_E)
        return grouped_linear(x_XD, w_EFD.weight, sizes_E, deterministic)
    x_XD = x_XD.astype(w_EFD.dtype)
    if target_is_cpu():
        return _in_blocks(x_XD, w_EFD, sizes_E, deterministic)
    if target_device().platform == "gpu" and len(x_XD) <= len(sizes_E):
        return _touched(x_XD, w_EFD, sizes_E)
    return grouped.grouped_product(x_XD, w_EFD, sizes_E)


def each_linear(x_TND: jax.Array, w_NFD: Leaf) -> jax.Array:
    """The rows of each head with the head's own matrix: float32 [T, N, F]."""
    T, N, D = x_TND.shape
    x_NTD = x_TND.swapaxes(0, 1)
    if isinstance(w_NFD, Observed):
        w_NFD.note(x_NTD.reshape(N * T, D), jnp.full(N, T, jnp.int32))
        return each_linear(x_TND, w_NFD.weight)
    if isinstance(w_NFD, Packed):
        sizes_N = jnp.full(N, T, jnp.int32)
        y_XF = packed.grouped_product(x_NTD.reshape(N * T, D), w_NFD, sizes_N)
        return y_XF.reshape(N, T, -1).swapaxes(0, 1)
    if isinstance(w_NFD, Quantized):
        return low_bit_product.products(x_NTD, w_NFD, jnp.arange(N)).swapaxes(0, 1)
    return _batched(x_NTD.astype(w_NFD.dtype), w_NFD).swapaxes(0, 1)


def _touched(x_XD: jax.Array, w_EFD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Few rows: each reads its matrix, and no other is read; XLA looks it up within the product."""
    group_X = group_of_rows(sizes_E, len(x_XD))
    y_X1F = _batched(x_XD[:, None], w_EFD[jnp.minimum(group_X, len(sizes_E) - 1)])
    return jnp.where((group_X < len(sizes_E))[:, None], y_X1F[:, 0], 0)


def _in_blocks(
    x_XD: jax.Array, w_EFD: jax.Array | Quantized, sizes_E: jax.Array, deterministic: bool
) -> jax.Array:
    """Each group in blocks of equally many rows, of which the last is padded; a block's matrix is
    copied for it, since `jax.lax.ragged_dot` reads all of them on a CPU, or expanded.
    """
    (X, D), E = x_XD.shape, len(sizes_E)
    most, rows = blocks(X, E, deterministic)
    num_blocks_E = -(-sizes_E // rows)
    first_E = (jnp.cumsum(num_blocks_E) - num_blocks_E) * rows - (jnp.cumsum(sizes_E) - sizes_E)
    group_X = group_of_rows(sizes_E, X)
    is_row_X1 = (group_X < E)[:, None]
    place_X = jnp.where(is_row_X1[:, 0], first_E[group_X] + jnp.arange(X), most * rows)
    block_XD = jnp.zeros((most * rows, D), x_XD.dtype).at[place_X].set(x_XD, mode="drop")
    matrix_X = group_of_rows(num_blocks_E, most)
    block_XWD = block_XD.reshape(most, rows, D)
    if isinstance(w_EFD, Quantized):
        y_XF = low_bit_product.products(block_XWD, w_EFD, matrix_X)
    else:
        y_XF = _batched(block_XWD, looked_up(w_EFD, jnp.minimum(matrix_X, E - 1)))
    y_XF = y_XF.reshape(most * rows, -1)
    return jnp.where(is_row_X1, y_XF.at[place_X].get(mode="clip"), 0)


def blocks(num_rows: int, num_groups: int, deterministic: bool = False) -> tuple[int, int]:
    """The most blocks that so many rows in so many groups make on a CPU, and the rows of one: as
    many as a group has on average, a power of two.
    """
    each = -(-num_rows // num_groups)
    rows = min(max(_LEAST_ROWS, 1 << (each - 1).bit_length()), _MOST_ROWS)
    rows = _STEADY_ROWS if deterministic else rows
    return num_rows // rows + min(num_groups, num_rows), rows


def group_of_rows(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """i32[X], the group of each row; E behind the last one."""
    return (jnp.arange(num_rows)[:, None] >= jnp.cumsum(sizes_E)).sum(1, dtype=jnp.int32)


def _batched(x_XWD: jax.Array, w_XFD: jax.Array) -> jax.Array:
    """x w^T for each of a batch: float32 [X, W, F]."""
    return jax.lax.dot_general(
        x_XWD, w_XFD, (((2,), (2,)), ((0,), (0,))), precision=_precision(w_XFD),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _precision(w: jax.Array) -> jax.lax.Precision | None:
    """A GPU's default for float32 operands is TF32, ten bits of mantissa."""
    return jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
