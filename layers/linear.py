"""The one projection. Every precision is a leaf type behind it; model code never branches on it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from configs.precision import OUTLIER_SIZE
from layers.kernels.device import target_is_cpu
from layers.kernels.linear import low_bit_product, packed
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.observed import Observed
from layers.kernels.linear.packed import Packed
from layers.reduce import row_sum

_MIN_ROWS = 2  # XLA's CPU backend converts the whole weight to float32 for a single bfloat16 row


Leaf = jax.Array | Packed | Quantized | Observed
Weight = Leaf | tuple[Leaf, ...] | Mapping[str, Leaf]


def linear(x_TD: jax.Array, w_FD: Weight) -> jax.Array:
    """x w^T: [T, D] x [F, D] -> float32 [T, F], in the weight's own precision with float32 sums; a
    stack whose parts have different formats is a tuple of them, a matrix with outliers a mapping.
    """
    if isinstance(w_FD, tuple):
        return jnp.concatenate([linear(x_TD, part) for part in w_FD], axis=-1)
    if isinstance(w_FD, Mapping):
        return _with_outliers(x_TD, w_FD)
    if isinstance(w_FD, Packed):
        return packed.product(x_TD, w_FD)
    if isinstance(w_FD, Quantized):
        return low_bit_product.product(x_TD, w_FD)
    if isinstance(w_FD, Observed):
        w_FD.note(x_TD, None)
        return linear(x_TD, w_FD.weight)
    rows = x_TD.shape[0]
    if rows < _MIN_ROWS and target_is_cpu():
        x_TD = jnp.pad(x_TD, ((0, _MIN_ROWS - rows), (0, 0)))
    # A GPU's default for float32 operands is TF32, ten bits of mantissa.
    precision = jax.lax.Precision.HIGHEST if w_FD.dtype == jnp.float32 else None
    y_TF = jax.lax.dot_general(
        x_TD.astype(w_FD.dtype), w_FD, (((1,), (1,)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y_TF[:rows]


def _with_outliers(x_TD: jax.Array, parts: Mapping[str, Leaf]) -> jax.Array:
    """LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): features of the activations that are far
    larger than others are multiplied in bfloat16, and so do not make the scale that all others of
    their token are rounded by. Which ones is a constant of the matrix: the paper's threshold asks
    the batch, so a token's result would depend on its neighbours. Of the others those that are
    large in this token alone get a scale of their own, as a row of the same product.
    """
    features_O = parts["features"]  # -1: one that another chip has
    assert isinstance(features_O, jax.Array)
    is_apart_D = (jnp.arange(x_TD.shape[1])[:, None] == features_O).any(1)
    apart_TO = jnp.where(features_O >= 0, x_TD[:, jnp.maximum(features_O, 0)], 0)
    rest_TD = jnp.where(is_apart_D, 0, x_TD).astype(jnp.float32)
    size_T1 = jnp.sqrt(row_sum(jnp.square(rest_TD)) / rest_TD.shape[1])
    is_large_TD = jnp.abs(rest_TD) > OUTLIER_SIZE * size_T1
    both = jnp.where(is_large_TD, 0, rest_TD), jnp.where(is_large_TD, rest_TD, 0)
    usual_TF, large_TF = jnp.split(linear(jnp.concatenate(both), parts["int8"]), 2)
    outliers_FO = parts["outliers"]
    if isinstance(outliers_FO, jax.Array) and target_is_cpu():  # of which some XLA does not know
        outliers_FO = outliers_FO.astype(jnp.float32)
    return usual_TF + large_TF + linear(apart_TO, outliers_FO)


def add_bias(y_TF: jax.Array, params: Mapping[str, jax.Array], name: str) -> jax.Array:
    """y + params[name], float32 [T, F], where a layer declares that bias."""
    return y_TF + params[name].astype(jnp.float32) if name in params else y_TF


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap) (Bello et al. 2017, arXiv 1611.09940): near 0 x itself, never beyond the
    cap.
    """
    return cap * jnp.tanh(x / cap)
