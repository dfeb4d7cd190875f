"""Feed-forward layers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from configs.kinds.feed_forward import Gated, Plain
from configs.model import ModelConfig
from layers.kernels.cpu import rows
from layers.linear import add_bias, linear
from layers.params import Params
from sharding import collectives

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated(params: Params, config: ModelConfig, kind: Gated, x_TD: jax.Array) -> jax.Array:
    """down(act(gate x) * up x), float32 [T, D]."""
    gate_up_TX = add_bias(linear(x_TD, params["gate_up"]), params, "gate_up_bias")
    return _down(params, config, _gate(kind.activation, config.dtype)(gate_up_TX))


@functools.cache  # one function for all layers
def _gate(activation: str, dtype: str) -> Callable[[jax.Array], jax.Array]:
    def reference(gate_up_TX: jax.Array) -> jax.Array:
        gate_TF, up_TF = jnp.split(gate_up_TX, 2, axis=-1)
        return (_ACTIVATIONS[activation](gate_TF) * up_TF).astype(dtype)

    def kernel(gate_up_TX: jax.Array) -> jax.Array:
        return rows.gate(gate_up_TX, activation, dtype)

    return rows.kernel_or(reference, kernel)


def plain(params: Params, config: ModelConfig, kind: Plain, x_TD: jax.Array) -> jax.Array:
    """down(act(up x)), float32 [T, D]."""
    up_TF = add_bias(linear(x_TD, params["up"]), params, "up_bias")
    return _down(params, config, _ACTIVATIONS[kind.activation](up_TF))


def _down(params: Params, config: ModelConfig, hidden_TF: jax.Array) -> jax.Array:
    out_TD = collectives.total(linear(hidden_TF.astype(config.dtype), params["down"]))
    return add_bias(out_TD, params, "down_bias")
