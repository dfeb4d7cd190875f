"""Feed-forwards that every token visits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from configs.kinds.feed_forward import Gated, Plain
from configs.model import ModelConfig
from layers.backends import backends
from layers.linear import add_bias, linear
from layers.params import Params
from layers.registry import StepContext
from sharding import collectives

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(
    params: Params, config: ModelConfig, kind: Gated, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, None]:
    """down(act(gate x) * up x), float32 [T, D]."""
    out_TD = up_and_down(params, config, kind.activation, x_TD, kind.gate_scale)
    out_TD = add_bias(collectives.total(out_TD), params, "down_bias")
    return out_TD * kind.down_scale, None


def up_and_down(
    params: Params, config: ModelConfig, activation: str, x_TD: jax.Array, gate_scale: float = 1.0,
    limit: float | None = None, late_limit: float | None = None,
) -> jax.Array:  # fmt: skip
    """A gated feed-forward without its last bias, float32 [T, D]; on a mesh a part of the sum. The
    gate is at most `limit`, and what it meets within it, before the activation, or at most
    `late_limit` behind it.
    """
    if gate_scale == 1 and limit is late_limit is None and "gate_up_bias" not in params:
        multiply = backends.current().gated_product
        hidden_TF = multiply(x_TD, params["gate_up"], activation, config.dtype)
        if hidden_TF is not None:
            return linear(hidden_TF, params["down"])
    gate_up_TX = add_bias(linear(x_TD, params["gate_up"]), params, "gate_up_bias")
    if gate_scale != 1:
        gate_up_TX *= jnp.repeat(jnp.array([gate_scale, 1.0]), gate_up_TX.shape[1] // 2)
    if limit is not None:
        is_gate_X = jnp.arange(gate_up_TX.shape[1]) < gate_up_TX.shape[1] // 2
        gate_up_TX = jnp.clip(gate_up_TX, jnp.where(is_gate_X, -jnp.inf, -limit), limit)
    if late_limit is not None:
        gate_TF, up_TF = jnp.split(gate_up_TX, 2, axis=-1)
        hidden_TF = late_limited(ACTIVATIONS[activation], gate_TF, up_TF, late_limit)
        return linear(hidden_TF.astype(config.dtype), params["down"])
    return linear(gate(activation, config.dtype)(gate_up_TX), params["down"])


def late_limited(
    activation: Callable[[jax.Array], jax.Array], gate_TF: jax.Array, up_TF: jax.Array, limit: float
) -> jax.Array:
    """act(gate), which is at most `limit`, times up, which is within it: float32 [T, F]."""
    return jnp.minimum(activation(gate_TF), limit) * jnp.clip(up_TF, -limit, limit)


@functools.cache  # one function for all layers
def gate(activation: str, dtype: str) -> Callable[[jax.Array], jax.Array]:
    """What makes act(gate) up, [T, F] of `dtype`, of float32 [T, 2 F]: gates before the rest."""

    def reference(gate_up_TX: jax.Array) -> jax.Array:
        gate_TF, up_TF = jnp.split(gate_up_TX, 2, axis=-1)
        return (ACTIVATIONS[activation](gate_TF) * up_TF).astype(dtype)

    return backends.kernel_or(reference, lambda rows, x_TX: rows.gate(x_TX, activation, dtype))


def plain(
    params: Params, config: ModelConfig, kind: Plain, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, None]:
    """down(act(up x)), float32 [T, D]."""
    out_TD = collectives.total(up_alone_and_down(params, config, kind.activation, x_TD))
    return add_bias(out_TD, params, "down_bias"), None


def up_alone_and_down(
    params: Params, config: ModelConfig, activation: str, x_TD: jax.Array
) -> jax.Array:
    """A plain feed-forward without its last bias, as `up_and_down`."""
    up_TF = add_bias(linear(x_TD, params["up"]), params, "up_bias")
    if activation == "xielu":
        hidden_TF = xielu(up_TF, params["curve"])
    else:
        hidden_TF = ACTIVATIONS[activation](up_TF)
    return linear(hidden_TF.astype(config.dtype), params["down"])


def xielu(x_TF: jax.Array, curve_X: jax.Array) -> jax.Array:
    """The integral of an ELU (Huang & Schlag 2024, arXiv 2411.13010), float32 [T, F]; 0 stays 0.

    Args:
        curve_X: float32 [4], as `Plain.parameters` says.
    """
    alpha_p, alpha_n = jax.nn.softplus(curve_X[:2])
    beta, epsilon = curve_X[2:]
    below_TF = (jnp.expm1(jnp.minimum(x_TF, epsilon)) - x_TF) * (alpha_n + beta)
    return jnp.where(x_TF < 0, below_TF, alpha_p * x_TF * x_TF) + beta * x_TF
