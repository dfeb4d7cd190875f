"""A mixture of experts for few tokens on Hopper GPUs, in three launches: routing, gates' products,
and the sum of the experts' results.

Each matrix of an expert with tokens is read once, and multiplies all tokens. Columns of the tensor
core would be empty otherwise, and sorting rows would cost launches. An expert's result is 0 for
tokens that are not routed to it. The last product's depth goes on from one expert to the next, in
ascending order, so a token's results are summed in registers; the zeros of other experts change no
bit. So a token's bits do not depend on the others.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from configs.kinds.experts import Experts
from layers.kernels.experts import routing_gpu
from layers.kernels.experts.routing_gpu import UsedExperts
from layers.kernels.linear import skinny_gpu
from layers.kernels.linear.low_bit import Quantized


def can_mix(kind: Experts, num_tokens: int, gate_up: Any, down: Any) -> bool:
    """Whether the kernels take so many tokens, such a router and such stacks of matrices."""
    return (
        all(isinstance(stack, jax.Array | Quantized) for stack in (gate_up, down))
        and routing_gpu.can_route(kind.router, num_tokens, kind.num_experts, kind.top_k)
        and skinny_gpu.can_gate(num_tokens, gate_up)
        and skinny_gpu.can_sum(num_tokens, down)
    )


def mix(
    kind: Experts,
    x_TD: jax.Array,
    logits_TE: jax.Array,
    valid_T: jax.Array,
    experts: Mapping[str, Any],
    gate: Callable[[jax.Array, jax.Array], jax.Array],
    offsets_E: jax.Array | None = None,
    factors_E: jax.Array | None = None,
    interpret: object = None,
) -> tuple[UsedExperts, jax.Array]:
    """Routes tokens, and sums their experts' results by weight without the last bias, float32
    [T, D], of what `can_mix` allows.

    Args:
        logits_TE: float32, of the router.
        valid_T: bool, False for padding.
        experts: 'gate_up' [E, 2 F, D], 'gate_up_bias' [E, 2, F] if there is one, 'down' [E, D, F].
        gate: (gates, what they meet) -> hidden, float32.
        offsets_E, factors_E: of `routing_gpu.route`.
        interpret: takes `InterpretGPUParams`.
    """
    with jax.named_scope("router"):
        routed = routing_gpu.route(
            logits_TE, valid_T, kind.router, kind.top_k, offsets_E, factors_E, interpret
        )
    with jax.named_scope("experts"):
        bias_EF = None
        if kind.has_bias:
            bias_EF = experts["gate_up_bias"].reshape(kind.num_experts, -1)
        hidden_BWF = skinny_gpu.expert_products(
            x_TD, experts["gate_up"], routed.used,
            min(kind.num_experts, len(x_TD) * kind.top_k), gate, routed.weights_EW, bias_EF,
            top_k=kind.top_k, weighs_inputs=kind.weighs_inputs, interpret=interpret,
        )  # fmt: skip
        return routed, skinny_gpu.sum_of_products(
            hidden_BWF, len(x_TD), experts["down"], routed.used, interpret=interpret
        )
