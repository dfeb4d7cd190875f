"""Feed-forward layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from layers.linear import linear
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
    width, hidden = config.width, config.ffn_width
    return {
        "gate_up": ParamInfo((2 * hidden, width), config.dtype, ("ffn", "embed")),
        "down": ParamInfo((width, hidden), config.dtype, ("embed", "ffn")),
    }


def gated(params: Params, config: ModelConfig, x_TD: jax.Array) -> jax.Array:
    """GLU (Shazeer 2020, arXiv 2002.05202): down(act(gate x) * up x), float32 [T, D]."""
    gate_TF, up_TF = jnp.split(linear(x_TD, params["gate_up"]), 2, axis=-1)
    hidden_TF = _ACTIVATIONS[config.activation](gate_TF) * up_TF
    return linear(hidden_TF.astype(config.dtype), params["down"])
