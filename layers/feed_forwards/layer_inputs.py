"""What each layer is told of a token beside the residual stream: `configs/kinds/layer_inputs.py`
declares it.
"""

import jax
import jax.numpy as jnp

from configs.kinds.layer_inputs import LayerInputs
from configs.model import ModelConfig
from layers import norm
from layers.feed_forwards.dense import ACTIVATIONS
from layers.linear import linear
from layers.params import Params


def of_tokens(
    params: Params, config: ModelConfig, kind: LayerInputs, rows_TX: jax.Array, x_TD: jax.Array
) -> jax.Array:
    """The inputs of all layers, float32 [L, T, P], of rows of the table [T, L P] and tokens as the
    first layer reads them.
    """
    T, P = x_TD.shape[0], kind.width
    projected_TLP = linear(x_TD, params["projection"]).reshape(T, -1, P) * config.width**-0.5
    projected_TLP = norm.apply(projected_TLP, params["projection_norm"], config)
    both_TLP = (projected_TLP + rows_TX.reshape(T, -1, P) * P**0.5) * 2**-0.5
    return jnp.swapaxes(both_TLP, 0, 1)


def apply(
    params: Params, config: ModelConfig, kind: LayerInputs, x_TD: jax.Array, input_TP: jax.Array
) -> jax.Array:
    """What a layer adds for its input: float32 [T, D]."""
    gate_TP = ACTIVATIONS[kind.activation](linear(x_TD, params["gate"]))
    out_TD = linear((gate_TP * input_TP).astype(config.dtype), params["out"])
    return norm.apply(out_TD, params["norm"], config)
