"""Sums of rows: on a CPU their bits do not depend on how many rows are summed beside them."""

import jax
import jax.numpy as jnp

from layers.backends import backends

_SPLIT = 128
_MIN_ROWS = 8  # a product of fewer is another kernel of XLA's, which sums in another order


def row_sum(x: jax.Array) -> jax.Array:
    """Sums the last axis, float32 [..., X] -> [..., 1].

    On a CPU by a product with ones: XLA's backend orders a plain sum by the size of the whole
    array, and a product (of at least 8 rows, with a matrix stored [out, in]) by X alone.
    """
    if not backends.current().sums_by_product:
        return x.sum(axis=-1, keepdims=True)
    width = x.shape[-1]
    if width > _SPLIT * 8 and width % _SPLIT == 0:
        parts = row_sum(x.reshape(*x.shape[:-1], width // _SPLIT, _SPLIT))
        return row_sum(parts[..., 0])
    ones_8X = jnp.ones((8, width), jnp.float32)  # a single column would be another kernel
    return _product(x.reshape(-1, width), ones_8X)[:, :1].reshape(*x.shape[:-1], 1)


def sums_before(x_QJ: jax.Array) -> jax.Array:
    """Exclusive sums of each row, from 0, float32 [Q, J], by a product as in `row_sum` on a CPU."""
    return _product(x_QJ, jnp.tri(x_QJ.shape[1], k=-1, dtype=jnp.float32))


def log_sum_exp(x: jax.Array) -> jax.Array:
    """log of the sum of exp over the last axis, float32 [..., X] -> [...]; -inf for only -inf."""
    top = jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (top + jnp.log(row_sum(jnp.exp(x - top))))[..., 0]


def _product(x_QX: jax.Array, y_FX: jax.Array) -> jax.Array:
    rows, dims = x_QX.shape[0], (((1,), (1,)), ((), ()))
    x_QX = jnp.pad(x_QX, ((0, max(0, _MIN_ROWS - rows)), (0, 0)))
    return jax.lax.dot_general(x_QX, y_FX, dims, precision=jax.lax.Precision.HIGHEST)[:rows]
