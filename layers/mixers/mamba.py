"""State-space mixers over a step's rectangles, or (without a cache) over the rows themselves."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.model import ModelConfig
from layers.backends import backends
from layers.kernels.recurrence import api as fused
from layers.kv_cache import Recurrent, with_states
from layers.linear import add_bias, linear, project_out
from layers.norm import gated_norm, rms_norm
from layers.params import Params
from layers.recurrence import diagonal, rows
from layers.recurrence import linear as linear_attention
from layers.recurrence.rows import Recurrence
from layers.recurrence.sums import rounded
from layers.registry import StepContext
from sharding import collectives


def apply_mamba(
    params: Params,
    config: ModelConfig,
    kind: Mamba,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """Returns float32 [T, D] and the leaf, a tail and a state of each sequence. Chips along `model`
    have their own channels, and sum what each token chooses for all of them.
    """
    ragged = context.ragged
    with jax.named_scope("in"):
        fed_TX, gate_TX = jnp.split(
            add_bias(linear(x_TD, params["in"]), params, "in_bias"), 2, axis=1
        )
    taps_Xw, bias_X = params["conv"], params.get("conv_bias")
    tails, states = (None, None) if leaf is None else leaf.states
    outs = []
    with jax.named_scope("convolve"):
        for fed_YWX, rectangle in zip(ragged.split(fed_TX), ragged.rectangles, strict=True):
            (out_YWX,), tails = rows.convolve(
                fed_YWX, taps_Xw, bias_X, tails, rectangle, fed_YWX.shape[2:]
            )
            outs.append(out_YWX)
    fed_TX = ragged.pack(outs)
    with jax.named_scope("choose"):
        step_TX, B_TM, C_TM = _chosen(params, config, kind, fed_TX)
        step_TX = jnp.where(ragged.valid_T[:, None], step_TX, 0)  # a token that changes nothing
    A_MX = -jnp.exp(params["decay"]).T
    kernel = backends.current().scan
    scan = Recurrence(
        A_MX.shape,
        lambda x_YWX, dt_YWX, *more: diagonal.recurrent(x_YWX, dt_YWX, A_MX, *more),
        lambda x_YWX, dt_YWX, *more: diagonal.chunked(x_YWX, dt_YWX, A_MX, *more),
        kernel and (lambda x_YWX, dt_YWX, *more: kernel(x_YWX, dt_YWX, A_MX, *more)),
    )
    sequences, outs = zip(*map(ragged.split, (fed_TX, step_TX, B_TM, C_TM)), strict=True), []
    with jax.named_scope("recur"):
        for inputs, rectangle in zip(sequences, ragged.rectangles, strict=True):
            out_YWX, states = rows.recur(scan, inputs, states, rectangle, context.deterministic)
            outs.append(out_YWX)
    y_TX = ragged.pack(outs) + rounded(params["skip"] * fed_TX)
    y_TX *= jax.nn.silu(gate_TX)
    return project_out(y_TX, params, config.dtype), with_states(leaf, tails, states)


def _chosen(
    params: Params, config: ModelConfig, kind: Mamba, x_TX: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What tokens choose: the steps of a chip's channels, [T, X], and B and C [T, M]."""
    choice_TX = collectives.total(
        linear(x_TX.astype(config.dtype), params["choice"]), collectives.HEADS
    )
    first, second, _ = kind.chosen
    parts = jnp.split(choice_TX, [first, first + second], axis=1)
    if kind.norms is not None:
        eps = config.norm_eps if kind.norm_eps is None else kind.norm_eps
        names = "step_norm", "b_norm", "c_norm"
        weights = [
            params[name] if kind.norms == "weighted" else jnp.ones(width)
            for name, width in zip(names, kind.chosen, strict=True)
        ]
        parts = [rms_norm(x_TX, weight, eps) for x_TX, weight in zip(parts, weights, strict=True)]
    steps_TR, B_TM, C_TM = parts
    step_TX = linear(steps_TR.astype(config.dtype), params["step"]) + params["step_bias"]
    return jax.nn.softplus(step_TX), B_TM, C_TM


def apply_mamba2(
    params: Params,
    config: ModelConfig,
    kind: Mamba2,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """One Mamba-2 layer: float32 [T, D], and the leaf, a tail and a state of each sequence."""
    N, H, G, M = kind.num_heads, kind.head_width, kind.num_groups, kind.state_width
    ragged = context.ragged
    with jax.named_scope("in"):
        fed_TX = add_bias(linear(x_TD, params["in"]), params, "in_bias")
        gates_TX = add_bias(linear(x_TD, params["gates"]), params, "gates_bias")
    if kind.part_scales:
        gate, *fed, step = kind.part_scales
        fed_TX *= _spread(fed, kind.channels)
        gates_TX *= _spread((gate, step), (N * H, N))
    gate_TI, step_TN = jnp.split(gates_TX, [N * H], axis=1)
    step_TN = jnp.clip(jax.nn.softplus(step_TN + params["step_bias"]), *kind.step_limits)
    step_TN = jnp.where(ragged.valid_T[:, None], step_TN, 0)  # a token that changes nothing
    taps_Xw, bias_X = params["conv"], params.get("conv_bias")
    rate_N = -jnp.exp(params["decay"])
    recurrence = Recurrence(
        (N, M, H), linear_attention.recurrent, linear_attention.chunked, fused.update_linear
    )
    tails, states = (None, None) if leaf is None else leaf.states
    outs = []
    with jax.named_scope("recur"):
        parts = zip(ragged.split(fed_TX), ragged.split(step_TN), ragged.rectangles, strict=True)
        for fed_YWX, step_YWN, rectangle in parts:
            (x_YWI, in_YWX, out_YWX), tails = rows.convolve(
                fed_YWX, taps_Xw, bias_X, tails, rectangle, kind.channels
            )
            Y, W, _ = fed_YWX.shape
            x_YWNH = x_YWI.reshape(Y, W, N, H)
            in_YWGM, out_YWGM = (maps.reshape(Y, W, G, M) for maps in (in_YWX, out_YWX))
            inputs = out_YWGM, in_YWGM, x_YWNH * step_YWN[..., None], step_YWN * rate_N
            y_YWNH, states = rows.recur(
                recurrence, inputs, states, rectangle, context.deterministic
            )
            y_YWNH += rounded(params["skip"][:, None] * x_YWNH)
            outs.append(y_YWNH.reshape(Y, W, N * H))
    y_TI = ragged.pack(outs)
    if kind.norm_width != 0:
        y_TI = gated_norm(
            y_TI, gate_TI, params["out_norm"], config.norm_eps, kind.norm_width, kind.norms_first,
            config.dtype,
        )  # fmt: skip
    else:
        y_TI *= jax.nn.silu(gate_TI)
    return project_out(y_TI, params, config.dtype), with_states(leaf, tails, states)


def _spread(scales: Sequence[float], sizes: Sequence[int]) -> jax.Array:
    return jnp.concatenate([jnp.full(n, scale) for scale, n in zip(scales, sizes, strict=True)])
