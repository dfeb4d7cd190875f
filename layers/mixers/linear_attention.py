"""Linear attention over a step's rectangles, or (without a cache) over the rows themselves."""

import math

import jax
import jax.numpy as jnp

from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.model import ModelConfig
from layers.kernels.recurrence import api as fused
from layers.kv_cache import Recurrent, with_states
from layers.linear import linear, project_out
from layers.params import Params
from layers.recurrence import linear as linear_attention
from layers.recurrence import rows
from layers.recurrence.rows import Recurrence
from layers.reduce import row_sum
from layers.registry import StepContext
from sharding import collectives

_NORM_EPS = 1e-6
_LEAST = 1e-6  # beside the sum of a query's weights, which padding does not have


def apply(
    params: Params,
    config: ModelConfig,
    kind: LinearAttention,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """One layer: float32 [T, D], and the leaf, a state of each sequence."""
    N, H, ragged = kind.num_heads, kind.value_width, context.ragged
    with jax.named_scope("in"):
        fed_TX = linear(x_TD, params["in"])
        if kind.feature_map == "silu":
            fed_TX = jax.nn.silu(fed_TX)
        q_TX, k_TX, v_TX = jnp.split(fed_TX, [N * kind.key_width, 2 * N * kind.key_width], axis=1)
        q_TNM = mapped(q_TX.reshape(-1, N, kind.key_width), kind.feature_map)
        k_TNM = mapped(k_TX.reshape(-1, N, kind.key_width), kind.feature_map)
        v_TNH = v_TX.reshape(-1, N, H)
        if kind.is_normalized:  # the sum of weights is that of weighted ones
            v_TNH = jnp.concatenate([v_TNH, jnp.ones_like(v_TNH[..., :1])], axis=2)
    k_TNM = jnp.where(ragged.valid_T[:, None, None], k_TNM, 0)  # padding changes nothing
    inputs_T = [q_TNM, k_TNM, v_TNH]
    if kind.decay is not None:
        inputs_T.append(jnp.where(ragged.valid_T[:, None], log_decays(kind), 0))
    recurrence = Recurrence(
        kind.state, linear_attention.recurrent, linear_attention.chunked, fused.update_linear
    )
    states, outs = None if leaf is None else leaf.states[0], []
    with jax.named_scope("recur"):
        for *inputs, rectangle in zip(*map(ragged.split, inputs_T), ragged.rectangles, strict=True):
            recurrence_inputs = (*inputs, None) if kind.decay is None else tuple(inputs)
            out_YWNH, states = rows.recur(
                recurrence, recurrence_inputs, states, rectangle, context.deterministic
            )
            outs.append(out_YWNH)
    out_TNH = ragged.pack(outs)
    if kind.is_normalized:
        out_TNH = out_TNH[..., :H] / (out_TNH[..., H:] + _LEAST)
    out_TX = out_TNH.reshape(-1, N * H)
    if kind.has_gated_norm:
        out_TX = _normed(out_TX, params["out_norm"]) * jax.nn.sigmoid(linear(x_TD, params["gate"]))
    return project_out(out_TX, params, config.dtype), with_states(leaf, states)


def mapped(x_TNM: jax.Array, feature_map: str) -> jax.Array:
    """Applies a feature map of `LinearAttention`; a pair's two equal products are one feature."""
    if feature_map == "silu":
        return x_TNM
    if feature_map == "elu":
        return jnp.where(x_TNM > 0, x_TNM + 1, jnp.exp(jnp.minimum(x_TNM, 0)))
    width = x_TNM.shape[-1]
    x_TNM = x_TNM * width**-0.25
    first, second = jnp.triu_indices(width)
    weights = jnp.where(first == second, math.sqrt(0.5), 1.0)
    squares_TNX = weights * x_TNM[..., first] * x_TNM[..., second]
    return jnp.concatenate([jnp.ones_like(x_TNM[..., :1]), x_TNM, squares_TNX], axis=-1)


def log_decays(kind: LinearAttention) -> jax.Array:
    """Of each head on this chip, float32 [N]."""
    assert kind.decay is not None
    chips, chip = collectives.num_chips(collectives.HEADS), collectives.chip(collectives.HEADS)
    number_N = 1 + chip * kind.num_heads + jnp.arange(kind.num_heads)
    return -kind.decay * jnp.exp2(-8 * number_N / (kind.num_heads * chips))


def _normed(x_TX: jax.Array, weight: jax.Array) -> jax.Array:
    """RMS norm of what the heads of all chips return."""
    with jax.named_scope("norm"):
        width = x_TX.shape[1] * collectives.num_chips(collectives.HEADS)
        squares_T1 = collectives.total(row_sum(x_TX * x_TX), collectives.HEADS) / width
        return x_TX * jax.lax.rsqrt(squares_T1 + _NORM_EPS) * weight.astype(jnp.float32)
