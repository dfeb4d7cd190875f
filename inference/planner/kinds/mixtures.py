"""What a mixture of experts costs by the number of requests: the experts that a step reads, and
how long reading them is what it waits for.
"""

import dataclasses

from inference.planner import cost, roofline, weights
from inference.planner.deployment import Deployment

_BATCHES = (1, 8, 32, 128, 512, 2048)


@dataclasses.dataclass(frozen=True)
class ExpertReads:
    """A decode step.

    Attributes:
        batch: sequences of a replica.
        visited: experts of a layer that at least one token is routed to, expected where each token
            chooses evenly and on its own.
        chip_bytes: of their weights, in all layers, that a chip reads.
        share: of all bytes that it moves.
        step_s: time of the step.
    """

    batch: int
    visited: float
    chip_bytes: float
    share: float
    step_s: float


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What is worth knowing of a mixture before it is deployed.

    Attributes:
        num_experts, top_k: of the layer with most experts, and those that a token is routed to.
        parameters, active_parameters: all, and those that one token is multiplied with.
        visits: by batch, as far as the batch fits.
        bound_until: most sequences whose step takes longer to read its experts than for its
            cache, its arithmetic or its exchange; 0: it never does.
        then: which of these takes longer with one sequence more: 'cache', 'arithmetic' or
            'exchange'; None: no more sequences fit.
    """

    num_experts: int
    top_k: int
    parameters: int
    active_parameters: int
    visits: tuple[ExpertReads, ...]
    bound_until: int
    then: str | None


def describe(deployment: Deployment, context: int, new_tokens: int) -> Mixture | None:
    """The mixture of a deployment, of requests of `context` tokens and `new_tokens` new ones; None
    where there is none, or no sequence fits.
    """
    plain = dataclasses.replace(deployment, speculation=None)
    config, middle = plain.config, context + new_tokens // 2
    max_batch = plain.largest_batch(context, new_tokens)
    if not config.experts or not max_batch:
        return None
    num_experts, top_k = max(config.experts)
    last = _bound_until(plain, middle, max_batch)
    waits = _seconds(plain, min(last + 1, max_batch), middle)
    return Mixture(
        num_experts, top_k, weights.num_parameters(config), weights.num_active_parameters(config),
        tuple(_expert_reads(plain, batch, middle) for batch in _BATCHES if batch <= max_batch),
        last,
        max(waits, key=lambda name: waits[name]) if last < max_batch else None,
    )  # fmt: skip


def _expert_reads(deployment: Deployment, batch: int, context: int) -> ExpertReads:
    operations = deployment.decode_operations(batch, context)
    on_chip = [roofline.per_chip(operation, deployment.mesh) for operation in operations]
    read = sum(operation.weight_bytes for operation in on_chip if operation.by_expert)
    num_tokens = deployment.decode_work(batch, context).num_tokens
    visited = cost.num_visited(*max(deployment.config.experts), num_tokens)
    return ExpertReads(
        batch, visited, read, read / sum(operation.bytes for operation in on_chip),
        deployment.decode_time(batch, context).total_s,
    )  # fmt: skip


def _seconds(deployment: Deployment, batch: int, context: int) -> dict[str, float]:
    """Parts of a decode step that grow with the batch, but for reading experts."""
    time = deployment.decode_time(batch, context)
    read = [
        dataclasses.replace(operation, weight_bytes=0.0, activation_bytes=0.0)
        for operation in deployment.decode_operations(batch, context)
    ]
    cached = deployment.step_time(read).memory_s
    return {"cache": cached, "arithmetic": time.compute_s, "exchange": time.collective_s}


def _bound_until(deployment: Deployment, context: int, max_batch: int) -> int:
    """The bisection behind `Mixture.bound_until`: bytes of experts grow ever more slowly with the
    batch, all else grows with it.
    """

    def is_bound(batch: int) -> bool:
        read = [
            dataclasses.replace(operation, cache_bytes=0.0, activation_bytes=0.0)
            for operation in deployment.decode_operations(batch, context)
            if operation.by_expert
        ]
        experts_s = deployment.step_time(read).memory_s
        return experts_s >= max(_seconds(deployment, batch, context).values())

    powers = [2**n for n in range(max_batch.bit_length())]
    least = max((batch for batch in powers if is_bound(batch)), default=0)
    limit = min(2 * least, max_batch)
    while least < limit:
        middle = (least + limit + 1) // 2
        least, limit = (middle, limit) if is_bound(middle) else (least, middle - 1)
    return least
