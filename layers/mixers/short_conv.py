"""Gated short convolutions over a step's rectangles, or (without a cache) over the rows."""

import jax
import jax.numpy as jnp

from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import ModelConfig
from layers.kv_cache import Recurrent, with_states
from layers.linear import add_bias, linear, project_out
from layers.params import Params
from layers.recurrence import rows
from layers.registry import StepContext


def apply(
    params: Params,
    config: ModelConfig,
    kind: ShortConv,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """One layer: float32 [T, D], and the leaf, a tail of each sequence."""
    ragged = context.ragged
    with jax.named_scope("in"):
        fed_TX = add_bias(linear(x_TD, params["in"]), params, "in_bias")
    before_TX, behind_TX, x_TX = jnp.split(fed_TX, 3, axis=1)
    taps_Xw, bias_X = params["conv"], params.get("conv_bias")
    tails, outs = None if leaf is None else leaf.states[0], []
    with jax.named_scope("convolve"):
        for x_YWX, rectangle in zip(ragged.split(before_TX * x_TX), ragged.rectangles, strict=True):
            (out_YWX,), tails = rows.convolve(
                x_YWX, taps_Xw, bias_X, tails, rectangle, x_YWX.shape[2:], has_silu=False
            )
            outs.append(out_YWX)
    out_TX = behind_TX * ragged.pack(outs)
    return project_out(out_TX, params, config.dtype), with_states(leaf, tails)
