"""Residual streams that mix (mHC; Xie et al. 2025, arXiv 2512.24880):
`configs/kinds/hyper_connections.py` declares them.

Sums of a few terms are added one by one, and products rounded first, so that their bits depend on
no other token.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from configs.kinds.hyper_connections import HyperConnections
from configs.model import ModelConfig
from layers import norm
from layers.backends import backends
from layers.linear import linear
from layers.params import Params
from layers.recurrence.sums import rounded


class Connections(NamedTuple):
    """How an output is added to the streams."""

    weights_TM: jax.Array  # float32, of the output in each stream
    mix_TMM: jax.Array  # float32, [t, from, to]


def opened(x_TX: jax.Array, kind: HyperConnections) -> jax.Array:
    """The streams in front of a layer, float32 [T, M, D]; those of the first are M times [T, D]."""
    if x_TX.ndim == 3:
        return x_TX
    return jnp.broadcast_to(x_TX[:, None], (x_TX.shape[0], kind.num_streams, x_TX.shape[1]))


def read(
    params: Params, config: ModelConfig, kind: HyperConnections, x_TMD: jax.Array
) -> tuple[jax.Array, Connections]:
    """What a mixer or feed-forward reads, float32 [T, D], and how its output is added."""
    with jax.named_scope("hyper"):
        M = kind.num_streams
        weights_TX = _products(params, config, x_TMD)
        factors = params["factors"].astype(jnp.float32)
        factors_X = jnp.concatenate(
            [jnp.broadcast_to(factors[n], count) for n, count in enumerate((M, M, M * M))]
        )
        weights_TX = _biased(weights_TX, factors_X, params)
        read_TM = jax.nn.sigmoid(weights_TX[:, :M]) + kind.eps
        added_TM = 2 * jax.nn.sigmoid(weights_TX[:, M : 2 * M])
        mix_TMM = _doubly_stochastic(weights_TX[:, 2 * M :].reshape(-1, M, M), kind)
        return _weighted(read_TM, x_TMD), Connections(added_TM, mix_TMM)


def added(x_TMD: jax.Array, out_TD: jax.Array, connections: Connections) -> jax.Array:
    """The streams behind a mixer or feed-forward, float32 [T, M, D]."""
    with jax.named_scope("hyper"):
        weights_TM, mix_TMM = connections
        mixed = [
            rounded(mix_TMM[:, stream, :, None] * x_TMD[:, stream, None])
            for stream in range(x_TMD.shape[1])
        ]
        return _total([rounded(weights_TM[:, :, None] * out_TD[:, None]), *mixed])


def closed(
    params: Params, config: ModelConfig, kind: HyperConnections, x_TMD: jax.Array
) -> jax.Array:
    """The sum of the last streams, float32 [T, D]."""
    with jax.named_scope("hyper"):
        weights_TM = _products(params, config, x_TMD)
        weights_TM = _biased(weights_TM, params["factors"].astype(jnp.float32), params)
        return _weighted(jax.nn.sigmoid(weights_TM) + kind.eps, x_TMD)


def _products(params: Params, config: ModelConfig, x_TMD: jax.Array) -> jax.Array:
    x_TX = x_TMD.reshape(x_TMD.shape[0], -1)
    ones_X = jnp.ones(x_TX.shape[1], jnp.float32)
    return linear(norm.rms_norm(x_TX, ones_X, config.norm_eps), params["weights"])


def _biased(weights_TX: jax.Array, factors_X: jax.Array, params: Params) -> jax.Array:
    return rounded(weights_TX * factors_X) + params["biases"].astype(jnp.float32)


def _doubly_stochastic(logits_TMM: jax.Array, kind: HyperConnections) -> jax.Array:
    """The softmax of each row, then columns and rows by turns divided by their sums."""
    powers_TMM = jnp.exp(logits_TMM - jax.lax.stop_gradient(logits_TMM.max(2, keepdims=True)))
    mix_TMM = powers_TMM / _sums(powers_TMM, 2) + kind.eps
    mix_TMM = mix_TMM / (_sums(mix_TMM, 1) + kind.eps)

    def turn(_: int | jax.Array, mix_TMM: jax.Array) -> jax.Array:
        mix_TMM = mix_TMM / (_sums(mix_TMM, 2) + kind.eps)
        return mix_TMM / (_sums(mix_TMM, 1) + kind.eps)

    return backends.current().repeated(kind.iterations - 1, turn, mix_TMM)


def _sums(x_TMM: jax.Array, axis: int) -> jax.Array:
    """Sums of rows (axis 2) or columns, kept as an axis of 1."""
    parts = [jax.lax.slice_in_dim(x_TMM, n, n + 1, axis=axis) for n in range(x_TMM.shape[axis])]
    return _total(parts)


def _weighted(weights_TM: jax.Array, x_TMD: jax.Array) -> jax.Array:
    return _total([
        rounded(weights_TM[:, stream, None] * x_TMD[:, stream])
        for stream in range(x_TMD.shape[1])
    ])  # fmt: skip


def _total(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)
