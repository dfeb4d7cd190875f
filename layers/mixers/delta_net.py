"""Gated DeltaNet and Kimi Delta Attention over a step's rectangles, or (without a cache) over the
rows themselves.
"""

import jax
import jax.numpy as jnp

from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import ModelConfig
from layers import norm
from layers.kernels.recurrence import api as fused
from layers.kv_cache import Recurrent, with_states
from layers.linear import linear, project_out
from layers.params import Params
from layers.recurrence import delta, rows
from layers.recurrence.rows import Recurrence
from layers.reduce import row_sum
from layers.registry import StepContext

_LENGTH_EPS = 1e-6  # beside the square of a query's or a key's length
_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def apply(
    params: Params,
    config: ModelConfig,
    kind: DeltaNet,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """One layer: float32 [T, D], and the leaf, a tail and a state of each sequence."""
    N, M, H = kind.num_heads, kind.key_width, kind.value_width
    ragged = context.ragged
    with jax.named_scope("in"):
        fed_TX = linear(x_TD, params["in"])
        gates = _gates(params, config, kind, x_TD)
    valid_T = ragged.valid_T[:, None]  # a token that is none changes nothing
    beta_TN = jnp.where(valid_T, kind.most_beta * jax.nn.sigmoid(gates["beta"]), 0)
    step_TX = jax.nn.softplus(gates["decay"] + params["step_bias"])
    step_TX = jnp.where(valid_T, step_TX, 0).reshape(len(x_TD), N, -1)
    decay_TNX = -jnp.exp(params["rate"])[:, None] * step_TX
    decay = decay_TNX[..., 0] if kind.decay_rank is None else decay_TNX
    recurrence = Recurrence((N, M, H), delta.recurrent, delta.chunked, fused.update)
    tails, states = (None, None) if leaf is None else leaf.states
    outs = []
    with jax.named_scope("recur"):
        parts = map(ragged.split, (fed_TX, decay, beta_TN))
        for fed_YWX, *factors, rectangle in zip(*parts, ragged.rectangles, strict=True):
            convolved, tails = rows.convolve(
                fed_YWX, params["conv"], None, tails, rectangle, kind.channels
            )
            inputs = *_heads(kind, *convolved), *factors
            out_YWNH, states = rows.recur(
                recurrence, inputs, states, rectangle, context.deterministic
            )
            outs.append(out_YWNH)
    out_TNH = ragged.pack(outs)
    with jax.named_scope("norm"):
        eps = config.norm_eps if kind.norm_eps is None else kind.norm_eps
        out_TNH = norm.rms_norm(out_TNH, params["out_norm"], eps)
        out_TX = out_TNH.reshape(len(x_TD), N * H) * _GATES[kind.gate](gates["gate"])
    return project_out(out_TX, params, config.dtype), with_states(leaf, tails, states)


def _gates(
    params: Params, config: ModelConfig, kind: DeltaNet, x_TD: jax.Array
) -> dict[str, jax.Array]:
    inputs = _parts(linear(x_TD, params["gates"]), kind.gates)
    if kind.ranks:
        lower = _parts(linear(x_TD, params["down"]), kind.ranks)
        for name, low_TX in lower.items():
            inputs[name] = linear(low_TX.astype(config.dtype), params[f"{name}_up"])
    return inputs


def _parts(x_TX: jax.Array, widths: dict[str, int]) -> dict[str, jax.Array]:
    parts, first = {}, 0
    for name, width in widths.items():
        parts[name] = x_TX[:, first : first + width]
        first += width
    return parts


def _heads(
    kind: DeltaNet, value_YWX: jax.Array, q_YWX: jax.Array, k_YWX: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys (of length 1, and queries times M ** -0.5) and values of each head."""
    Y, W, _ = value_YWX.shape

    def of_length_one(x_YWX: jax.Array) -> jax.Array:
        x_YWKM = x_YWX.reshape(Y, W, kind.num_key_heads, kind.key_width)
        x_YWKM = x_YWKM * jax.lax.rsqrt(row_sum(x_YWKM * x_YWKM) + _LENGTH_EPS)
        return jnp.repeat(x_YWKM, kind.num_heads // kind.num_key_heads, axis=2)

    q_YWNM, k_YWNM = of_length_one(q_YWX) * kind.key_width**-0.5, of_length_one(k_YWX)
    return q_YWNM, k_YWNM, value_YWX.reshape(Y, W, kind.num_heads, kind.value_width)
