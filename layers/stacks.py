"""Rows in groups, each with a matrix of its own: which row is of which group, blocks of rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from configs.kinds.experts import blocks


def in_blocks(
    products: Callable[[jax.Array, jax.Array], jax.Array],
    x_XD: jax.Array,
    sizes_E: jax.Array,
    deterministic: bool,
) -> jax.Array:
    """Each group in blocks of equally many rows, the last padded: float32 [X, F], 0 behind the last
    group. A block's matrix is copied, since `jax.lax.ragged_dot` reads all on a CPU, or expanded.

    Args:
        products: (blocks of rows [B, W, D], i32[B] which matrix each has, E for none) -> [B, W, F].
        x_XD: rows, sorted by group.
        sizes_E: i32[E], rows of each group.
        deterministic: a row's bits do not depend on the others.
    """
    (X, D), E = x_XD.shape, len(sizes_E)
    num_blocks, rows = blocks(X, E, deterministic)
    num_blocks_E = -(-sizes_E // rows)
    first_E = (jnp.cumsum(num_blocks_E) - num_blocks_E) * rows - (jnp.cumsum(sizes_E) - sizes_E)
    group_X = group_of_rows(sizes_E, X)
    is_row_X1 = (group_X < E)[:, None]
    place_X = jnp.where(is_row_X1[:, 0], first_E[group_X] + jnp.arange(X), num_blocks * rows)
    empty_XD = zeros((num_blocks * rows, D), x_XD.dtype, sizes_E)
    block_XD = empty_XD.at[place_X].set(x_XD, mode="drop")
    matrix_B = group_of_rows(num_blocks_E, num_blocks)
    y_XF = products(block_XD.reshape(num_blocks, rows, D), matrix_B).reshape(num_blocks * rows, -1)
    return jnp.where(is_row_X1, y_XF.at[place_X].get(mode="clip"), 0)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, counts: jax.Array) -> jax.Array:
    """Zeros that depend on counts, which are never negative. XLA makes equal constants of all
    layers at once on a GPU, so that each of them is there all the time.
    """
    return jnp.full(shape, jnp.minimum(counts[0], 0), dtype)


def group_of_rows(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """i32[X], the group of each row; E behind the last one."""
    return (jnp.arange(num_rows)[:, None] >= jnp.cumsum(sizes_E)).sum(1, dtype=jnp.int32)
