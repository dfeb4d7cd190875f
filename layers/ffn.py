"""Feed-forward layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from layers.linear import add_bias, linear
from layers.params import ParamInfo, Params

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Ffn(NamedTuple):
    """A feed-forward is two functions.

    Attributes:
        infos: config -> declaration of its parameters.
        apply: (params, config, x_TD) -> float32 [T, D].
    """

    infos: Callable[[ModelConfig], Any]
    apply: Callable[[Params, ModelConfig, jax.Array], jax.Array]


def infos(config: ModelConfig) -> dict[str, Any]:
    """Gate and up projections fused in one matrix [2F, D], and the way down [D, F]."""
    return _infos(config, "gate_up", 2 * config.ffn_width)


def plain_infos(config: ModelConfig) -> dict[str, Any]:
    """A projection up [F, D], and the way down [D, F]."""
    return _infos(config, "up", config.ffn_width)


def _infos(config: ModelConfig, up: str, rows: int) -> dict[str, Any]:
    declared = {
        up: ParamInfo((rows, config.width), config.dtype, ("ffn", "embed")),
        "down": ParamInfo((config.width, config.ffn_width), config.dtype, ("embed", "ffn")),
    }
    if "ffn" in config.biases:
        declared |= {
            f"{up}_bias": ParamInfo((rows,), config.dtype, ("ffn",), "zeros"),
            "down_bias": ParamInfo((config.width,), config.dtype, ("embed",), "zeros"),
        }
    return declared


def gated(params: Params, config: ModelConfig, x_TD: jax.Array) -> jax.Array:
    """GLU (Shazeer 2020, arXiv 2002.05202): down(act(gate x) * up x), float32 [T, D]."""
    gate_up_TX = add_bias(linear(x_TD, params["gate_up"]), params, "gate_up_bias")
    gate_TF, up_TF = jnp.split(gate_up_TX, 2, axis=-1)
    hidden_TF = _ACTIVATIONS[config.activation](gate_TF) * up_TF
    return _down(params, config, hidden_TF)


def plain(params: Params, config: ModelConfig, x_TD: jax.Array) -> jax.Array:
    """The first transformers' (Vaswani et al. 2017, arXiv 1706.03762): down(act(up x)), float32
    [T, D].
    """
    up_TF = add_bias(linear(x_TD, params["up"]), params, "up_bias")
    return _down(params, config, _ACTIVATIONS[config.activation](up_TF))


def _down(params: Params, config: ModelConfig, hidden_TF: jax.Array) -> jax.Array:
    return add_bias(linear(hidden_TF.astype(config.dtype), params["down"]), params, "down_bias")
