"""The one projection. Every precision is a leaf type behind it (`layers/weights.py`)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from layers import weights
from layers.weights import Weight
from sharding import collectives


def linear(x_TD: jax.Array, w_FD: Weight) -> jax.Array:
    """x w^T: [T, D] x [F, D] -> float32 [T, F], in the weight's own precision with float32 sums."""
    return weights.of(w_FD).product(x_TD)


def grouped_linear(
    x_XD: jax.Array, w_EFD: Weight, sizes_E: jax.Array, deterministic: bool
) -> jax.Array:
    """Multiplies sorted groups of rows by their matrices, as `weights.Operations.grouped`."""
    return weights.of(w_EFD).grouped(x_XD, sizes_E, deterministic)


def each_linear(x_TND: jax.Array, w_NFD: Weight) -> jax.Array:
    """The rows of each head with the head's own matrix: float32 [T, N, F]."""
    return weights.of(w_NFD).stacked(x_TND.swapaxes(0, 1)).swapaxes(0, 1)


def look_up(table_VD: Weight, ids_T: jax.Array) -> jax.Array:
    """Rows of a table, float32 [T, D]."""
    return weights.of(table_VD).rows(ids_T)


def add_bias(y_TF: jax.Array, params: Mapping[str, jax.Array], name: str) -> jax.Array:
    """y + params[name], float32 [T, F], where a layer declares that bias."""
    return y_TF + params[name].astype(jnp.float32) if name in params else y_TF


def project_out(x_TX: jax.Array, params: Mapping[str, Any], dtype: str) -> jax.Array:
    """A mixer's last product, summed over the chips that divide it, with a bias where the layer
    declares one: float32 [T, D].
    """
    with jax.named_scope("out"):
        out_TD = collectives.total(linear(x_TX.astype(dtype), params["out"]), collectives.HEADS)
        return add_bias(out_TD, params, "out_bias")


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap) (Bello et al. 2017, arXiv 1611.09940): x near 0, below cap, if any."""
    return x if cap is None else cap * jnp.tanh(x / cap)
