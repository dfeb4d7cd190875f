"""A mixture of experts: tokens are sorted by the experts that they visit, each expert multiplies
its own, and a token's results are summed by weight. No token is dropped; padding visits nobody.
"""

import functools

import jax
import jax.numpy as jnp

from configs.kinds.experts import Experts
from configs.model import ModelConfig
from layers.feed_forwards import dense, routing
from layers.linear import linear
from layers.params import Params
from layers.registry import StepContext
from layers.stacks import group_of_rows, grouped_linear
from sharding import collectives


def apply(
    params: Params, config: ModelConfig, kind: Experts, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, jax.Array]:
    """The sum of each token's experts, weighed, and of the shared one: float32 [T, D]; and how many
    tokens visited each expert, i32[E].
    """
    with jax.named_scope("router"):
        weights_TJ, ids_TJ = routing.route(params, kind.router, kind.top_k, x_TD)
        ids_TJ = jnp.where(context.ragged.valid_T[:, None], ids_TJ, kind.num_experts)
        ids_X = ids_TJ.ravel()
        visits_E = (ids_X[:, None] == jnp.arange(kind.num_experts)).sum(0, dtype=jnp.int32)
        order_X = jnp.argsort(ids_X, stable=True)
    with jax.named_scope("experts"):
        x_XD = x_TD[order_X // kind.top_k].astype(config.dtype)
        out_XD = _visit(params["experts"], config, kind, x_XD, visits_E, context.deterministic)
        out_TD = _weighed(weights_TJ, out_XD[jnp.argsort(order_X)].reshape(*ids_TJ.shape, -1))
    if kind.shared_width:
        with jax.named_scope("shared"):
            shared_TD = dense.up_and_down(params["shared"], config, kind.activation, x_TD)
            if kind.has_shared_gate:
                shared_TD *= jax.nn.sigmoid(linear(x_TD, params["shared_gate"]))
            out_TD += shared_TD
    out_TD = collectives.total(out_TD)
    if kind.has_bias:
        bias_ED = params["experts"]["down_bias"].astype(jnp.float32)
        out_TD += _weighed(weights_TJ, bias_ED.at[ids_TJ].get(mode="clip"))
    return out_TD, visits_E


def _weighed(weights_TJ: jax.Array, each_TJD: jax.Array) -> jax.Array:
    """The sum of a token's J results, in one order, whatever lies beside it: float32 [T, D]."""
    parts = [weights_TJ[:, nth, None] * each_TJD[:, nth] for nth in range(weights_TJ.shape[1])]
    return functools.reduce(jnp.add, parts)


def _visit(
    params: Params,
    config: ModelConfig,
    kind: Experts,
    x_XD: jax.Array,
    sizes_E: jax.Array,
    deterministic: bool,
) -> jax.Array:
    """Rows sorted by expert through their experts, without the last bias: float32 [X, D], on a mesh
    a chip's part of each sum.
    """
    gate_up_XF = grouped_linear(x_XD, params["gate_up"], sizes_E, deterministic)
    if kind.has_bias:
        expert_X = group_of_rows(sizes_E, len(x_XD))
        gate_up_XF += params["gate_up_bias"].astype(jnp.float32).at[expert_X].get(mode="clip")
    hidden_XF = _gated(kind, gate_up_XF, config.dtype)
    return grouped_linear(hidden_XF, params["down"], sizes_E, deterministic)


def _gated(kind: Experts, gate_up_XF: jax.Array, dtype: str) -> jax.Array:
    """act(gate) (up + offset) within the limit, [X, F] of `dtype`."""
    if kind.activation != "quick_gelu" and kind.limit is None and not kind.up_offset:
        return dense.gate(kind.activation, dtype)(gate_up_XF)
    gate_XF, up_XF = jnp.split(gate_up_XF, 2, axis=-1)
    if kind.limit is not None:
        gate_XF = jnp.minimum(gate_XF, kind.limit)
        up_XF = jnp.clip(up_XF, -kind.limit, kind.limit)
    return (dense.ACTIVATIONS[kind.activation](gate_XF) * (up_XF + kind.up_offset)).astype(dtype)
