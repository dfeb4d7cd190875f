"""S4D over a step's rectangles token by token or in chunks, or without a cache as convolutions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs.kinds.recurrent.s4 import S4
from configs.model import ModelConfig
from layers.kv_cache import Recurrent, with_states
from layers.linear import project_out
from layers.params import Params
from layers.recurrence import rows, s4d
from layers.recurrence.rows import Recurrence
from layers.recurrence.sums import rounded
from layers.registry import StepContext
from sharding import collectives

_STEPS = 1e-3, 1e-1  # the least and the largest, by channel evenly in their logarithms
_RATE = 0.5


def apply(
    params: Params,
    config: ModelConfig,
    kind: S4,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """Returns float32 [T, D], and the leaf with each sequence's states. Raises InputError if it has
    another number of channels than the residual stream.
    """
    X, M, ragged = kind.channels, kind.state_width, context.ragged
    kind.check_channels(config.width, collectives.num_chips(collectives.HEADS))
    first = collectives.chip(collectives.HEADS) * X
    x_TX = jax.lax.dynamic_slice_in_dim(x_TD, first, X, axis=1)
    log_a_XM, B_XM, C_XM = discretized(params, kind)
    dynamics = log_a_XM.T, B_XM.T, C_XM.T
    recurrence = Recurrence(
        (2, M, X),
        lambda x, is_valid, before: s4d.recurrent(x, *dynamics, before, is_valid),
        lambda x, is_valid, before, *more: s4d.chunked(x, *dynamics, before, is_valid, *more),
    )
    states, outs = None if leaf is None else leaf.states[0], []
    with jax.named_scope("recur"):
        parts = zip(ragged.split(x_TX), ragged.rectangles, strict=True)
        for x_YWX, rectangle in parts:
            if leaf is None and not context.deterministic:
                outs.append(s4d.convolved(x_YWX, *dynamics))
                continue
            out_YWX, states = rows.recur(
                recurrence, (x_YWX, rectangle.valid_YW), states, rectangle, context.deterministic
            )
            outs.append(out_YWX)
    out_TX = jax.nn.gelu(ragged.pack(outs) + rounded(params["skip"] * x_TX), approximate=False)
    value_TD, gate_TD = jnp.split(project_out(out_TX, params, config.dtype), 2, axis=1)
    return rounded(value_TD * jax.nn.sigmoid(gate_TD)), with_states(leaf, states)


def discretized(params: Params, kind: S4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each state's log decay a token, input factor (zero-order hold), readout: complex [X, M]."""
    X, M = kind.channels, kind.state_width
    chips, chip = collectives.num_chips(collectives.HEADS), collectives.chip(collectives.HEADS)
    share_X = (chip * X + jnp.arange(X) + 0.5) / (X * chips)
    smallest, largest = map(math.log, _STEPS)
    step_X1 = jnp.exp(rounded((largest - smallest) * share_X) + smallest + params["step"])[:, None]
    rate_XM = -_RATE * jnp.exp(params["rate"])
    frequency_XM = params["frequency"] + np.pi * np.arange(M, dtype=np.float32)
    # Products are rounded, lest another program adds what they would have had beyond float32.
    log_a = rounded(step_X1 * rate_XM), rounded(step_X1 * frequency_XM)
    length_XM = jnp.exp(log_a[0])
    real = rounded(length_XM * jnp.cos(log_a[1])) - 1
    imag = rounded(length_XM * jnp.sin(log_a[1]))
    squares = rounded(rate_XM * rate_XM) + rounded(frequency_XM * frequency_XM)
    B_XM = jax.lax.complex(
        (rounded(real * rate_XM) + rounded(imag * frequency_XM)) / squares,
        (rounded(imag * rate_XM) - rounded(real * frequency_XM)) / squares,
    )
    C_XM = jax.lax.complex(*jnp.split(params["read"] * math.sqrt(M), 2, axis=1))
    return jax.lax.complex(*log_a), B_XM, C_XM
