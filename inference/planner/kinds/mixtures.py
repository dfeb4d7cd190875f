"""What a mixture of experts costs by the number of requests: the experts that a step visits, and
how long reading them is what it waits for.
"""

import dataclasses

from inference.planner import cost, roofline, weights
from inference.planner.deployment import Deployment

_BATCHES = (1, 8, 32, 128, 512, 2048)


@dataclasses.dataclass(frozen=True)
class Visits:
    """A decode step.

    Attributes:
        batch: sequences of a replica.
        visited: experts of a layer that at least one token visits, expected where each token
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
        num_experts, top_k: of the layer with most experts, and those that a token visits.
        parameters, active_parameters: all, and those that one token is multiplied with.
        visits: by batch, as far as the batch fits.
        bound_until: most sequences whose step takes longer to read the visited experts than for its
            cache, its arithmetic or its exchange; 0: it never does.
        then: which of these takes longer with one sequence more: 'cache', 'arithmetic' or
            'exchange'; None: no more sequences fit.
    """

    num_experts: int
    top_k: int
    parameters: int
    active_parameters: int
    visits: tuple[Visits, ...]
    bound_until: int
    then: str | None


def describe(deployment: Deployment, context: int, new_tokens: int) -> Mixture | None:
    """The mixture of a deployment, of requests of `context` tokens and `new_tokens` new ones; None
    where there is none, or no sequence fits.
    """
    placed = dataclasses.replace(deployment, speculation=None)
    config, middle = placed.config, context + new_tokens // 2
    found = [layer.ffn.experts for layer in config.layers if layer.ffn and layer.ffn.experts]
    most = placed.largest_batch(context, new_tokens)
    if not found or not most:
        return None
    num_experts, top_k = max(found)
    last = _bound_until(placed, middle, most)
    waits = _seconds(placed, min(last + 1, most), middle)
    return Mixture(
        num_experts, top_k, weights.num_parameters(config), weights.num_active_parameters(config),
        tuple(_visits(placed, batch, middle) for batch in _BATCHES if batch <= most), last,
        max(waits, key=lambda name: waits[name]) if last < most else None,
    )  # fmt: skip


def _visits(placed: Deployment, batch: int, context: int) -> Visits:
    operations = placed.decode_operations(batch, context)
    on_chip = [roofline.per_chip(operation, placed.mesh) for operation in operations]
    read = sum(operation.weight_bytes for operation in on_chip if operation.by_expert)
    found = [layer.ffn.experts for layer in placed.config.layers if layer.ffn and layer.ffn.experts]
    visited = cost.num_visited(*max(found), placed.decode_work(batch, context).num_tokens)
    return Visits(
        batch, visited, read, read / sum(operation.bytes for operation in on_chip),
        placed.decode_time(batch, context).total_s,
    )  # fmt: skip


def _seconds(placed: Deployment, batch: int, context: int) -> dict[str, float]:
    """Parts of a decode step that grow with the batch, but for reading experts."""
    time = placed.decode_time(batch, context)
    operations = placed.decode_operations(batch, context)
    read = [
        dataclasses.replace(operation, weight_bytes=0.0, activation_bytes=0.0)
        for operation in operations
    ]
    cached = roofline.step_time(read, placed.hardware, placed.formats, placed.mesh).memory_s
    return {"cache": cached, "arithmetic": time.compute_s, "exchange": time.collective_s}


def _bound_until(placed: Deployment, context: int, most: int) -> int:
    """See `Mixture.bound_until`: visited experts grow ever more slowly, all else does not."""

    def is_bound(batch: int) -> bool:
        operations = placed.decode_operations(batch, context)
        read = [
            dataclasses.replace(operation, cache_bytes=0.0, activation_bytes=0.0)
            for operation in operations
            if operation.by_expert
        ]
        experts = roofline.step_time(read, placed.hardware, placed.formats, placed.mesh)
        return experts.memory_s >= max(_seconds(placed, batch, context).values())

    powers = [2**n for n in range(most.bit_length())]
    least = max((batch for batch in powers if is_bound(batch)), default=0)
    limit = min(2 * least, most)
    while least < limit:
        middle = (least + limit + 1) // 2
        least, limit = (middle, limit) if is_bound(middle) else (least, middle - 1)
    return least
