"""Rows in groups, each with a matrix of its own: which row is of which group, and blocks of them on
a CPU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Rows of a block on a CPU: with fewer, XLA's products are slow or sum in another order; with more,
# experts that few rows are routed to are mostly padding.
_LEAST_ROWS, _STEADY_ROWS, _MOST_ROWS = 2, 16, 64


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
    block_XD = jnp.zeros((num_blocks * rows, D), x_XD.dtype).at[place_X].set(x_XD, mode="drop")
    matrix_B = group_of_rows(num_blocks_E, num_blocks)
    y_XF = products(block_XD.reshape(num_blocks, rows, D), matrix_B).reshape(num_blocks * rows, -1)
    return jnp.where(is_row_X1, y_XF.at[place_X].get(mode="clip"), 0)


def blocks(num_rows: int, num_groups: int, deterministic: bool = False) -> tuple[int, int]:
    """The most blocks that so many rows in so many groups make on a CPU, and the rows of one: as
    many as a group has on average, a power of two.
    """
    mean = -(-num_rows // num_groups)
    rows = min(max(_LEAST_ROWS, 1 << (mean - 1).bit_length()), _MOST_ROWS)
    rows = _STEADY_ROWS if deterministic else rows
    return num_rows // rows + min(num_groups, num_rows), rows


def group_of_rows(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """i32[X], the group of each row; E behind the last one."""
    return (jnp.arange(num_rows)[:, None] >= jnp.cumsum(sizes_E)).sum(1, dtype=jnp.int32)
