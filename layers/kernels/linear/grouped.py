"""Products of sorted rows with a stack of matrices on accelerators, by JAX's own kernels: a matrix
is read for each tile of rows that meets it, and not at all where no row does.

XLA's `jax.lax.ragged_dot` multiplies every row with every matrix on GPUs, and copies the whole
stack to turn it on TPUs. It computes what the kernels do not: float32, on which they would round,
a depth that is not theirs, GPUs other than Hopper's, and gradients.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

_TPU_TILE = 128, 512, 512  # rows, depth, features
GPU_DEPTH = 64  # which divides that of a matrix
_GPU_ROWS, _GPU_FEATURES, _GPU_STEPS = 64, 128, 4


def grouped_product(
    x_XD: jax.Array,
    w_EFD: jax.Array,
    sizes_E: jax.Array,
    kernel: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """x w[e]^T of rows of w's type that are sorted by their matrix e, i32[E] of each: float32
    [X, F], 0 behind the last group. `kernel` is `on_tpu` or `on_gpu`; None: XLA's.
    """
    if kernel is None:
        return _by_xla(x_XD, w_EFD, sizes_E)
    differentiable = jax.custom_jvp(lambda *arrays: _zero_behind(kernel(*arrays), *arrays))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(_by_xla, primals, tangents))
    return differentiable(x_XD, w_EFD, sizes_E)


def _by_xla(x_XD: jax.Array, w_EFD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    exact = jax.lax.Precision.HIGHEST if w_EFD.dtype == jnp.float32 else None
    return jax.lax.ragged_dot_general(
        x_XD, w_EFD, sizes_E, dims, precision=exact, preferred_element_type=jnp.float32
    )


def _zero_behind(
    y_XF: jax.Array, x_XD: jax.Array, w_EFD: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """Rows behind the last group are whatever was there before."""
    is_row_X1 = (jnp.arange(len(x_XD)) < sizes_E.sum())[:, None]
    return jnp.where(is_row_X1, y_XF[: len(x_XD)], 0)


def on_tpu(
    x_XD: jax.Array, w_EFD: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
    """Megablox (Gale et al. 2022, arXiv 2211.15841), whose rows are whole tiles. It takes matrices
    as XLA lays them out, by rows or by columns, since it would turn the whole stack otherwise.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # slow to load

    X, (_, F, D) = len(x_XD), w_EFD.shape
    by_rows = _tiled_size(F, D) <= _tiled_size(D, F)
    rows = min(_TPU_TILE[0], -(-X // 16) * 16)
    tiling = rows, min(_TPU_TILE[1], D), min(_TPU_TILE[2], F)
    x_XD = jnp.pad(x_XD, ((0, -X % rows), (0, 0)))
    return gmm(
        x_XD, w_EFD if by_rows else w_EFD.swapaxes(1, 2), sizes_E, jnp.float32, tiling,
        transpose_rhs=by_rows, interpret=interpret,
    )  # fmt: skip


def _tiled_size(rows: int, columns: int) -> int:
    """Elements of a matrix in whole tiles of 8 by 128, of which XLA makes as few as it can."""
    return math.prod(-(-size // tile) * tile for size, tile in ((rows, 8), (columns, 128)))


def on_gpu(x_XD: jax.Array, w_EFD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Mosaic's, for Hopper; its sums leave in x's type."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    y_XF: jax.Array = ragged_dot_mgpu.ragged_dot(
        x_XD, w_EFD, group_sizes=sizes_E, block_m=_GPU_ROWS, block_n=_GPU_FEATURES,
        block_k=GPU_DEPTH, max_concurrent_steps=_GPU_STEPS, grid_block_n=1, transpose_rhs=True,
    )  # fmt: skip
    return y_XF.astype(jnp.float32)
