"""How tokens reach the experts of other chips: all of them gathered everywhere, which runs here, or
each sent to the chips that it visits (all-to-all), which is predicted alone.
"""

import dataclasses
import math

from configs.kinds.experts import Experts
from configs.mesh import Mesh
from inference.planner import roofline
from inference.planner.cost import Work
from inference.planner.deployment import Deployment

_WORD = 4  # bytes of an id, of a weight, of a count and of a float32


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """All exchange along `expert` in a step.

    Attributes:
        form: 'all-gather' or 'all-to-all'.
        bytes: that leave a chip.
        seconds: of them.
    """

    form: str
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both forms in a step.

    Attributes:
        name: of the step.
        mesh: chips of a replica.
        step_s: time of the step as it runs, with gathers.
        gathered, sent: its exchange along `expert`, and what all-to-all would make of it.
    """

    name: str
    mesh: Mesh
    step_s: float
    gathered: Dispatch
    sent: Dispatch

    @property
    def saved(self) -> float:
        """Share of the step that all-to-all would save; negative where it takes longer."""
        return (self.gathered.seconds - self.sent.seconds) / self.step_s


def compare(
    deployment: Deployment, batch: int, context: int, new_tokens: int
) -> tuple[Comparison, ...]:
    """Both forms where `batch` sequences decode on chips along `expert`, and where each group of
    chips with sequences of its own runs a prompt.
    """
    middle, prompts = context + new_tokens // 2, deployment.mesh.num_groups
    decode = deployment.decode_work(batch, middle), deployment.decode_time(batch, middle)
    prefill = deployment.prefill_work(prompts, context), deployment.prefill_time(prompts, context)
    return tuple(
        Comparison(name, deployment.mesh, time.total_s, *forms(deployment, work))
        for name, (work, time) in (
            (f"decode, batch {batch:,}", decode),
            (f"prefill, {prompts} x {context:,} tokens", prefill),
        )
    )


def chance_of_chip(experts: Experts, chips: int) -> float:
    """Probability that a token visits at least one expert of a certain chip, of so many that divide
    the experts in their order, where it chooses evenly: groups first, then experts of them.
    """
    router, num_experts = experts.router, experts.num_experts
    local_experts, group = num_experts // chips, num_experts // router.num_groups
    local_groups = max(1, local_experts // group)  # groups that the chip holds experts of
    eligible, probability = router.top_groups * group, 0.0
    for chosen in range(1, min(local_groups, router.top_groups) + 1):
        remote_choices = math.comb(router.num_groups - local_groups, router.top_groups - chosen)
        choices = math.comb(local_groups, chosen) * remote_choices
        likely = choices / math.comb(router.num_groups, router.top_groups)
        missed = math.comb(eligible - chosen * min(group, local_experts), experts.top_k)
        probability += likely * (1 - missed / math.comb(eligible, experts.top_k))
    return probability


def forms(deployment: Deployment, work: Work) -> tuple[Dispatch, Dispatch]:
    """Both forms in a step of one data-parallel group: all-gather, all-to-all.

    All-to-all sends a token once to each chip that it visits, with its choices, and gets one sum
    back; the numbers of tokens go ahead. A switch lets each pair of chips at each other; along a
    ring, whose two directions share the bandwidth, a message takes up a quarter of the ring on
    average (an all-gather's bytes are passed on as they are needed, and take up no more).
    """
    mesh, chip = deployment.mesh, deployment.hardware
    chips = mesh.expert
    gathers = [
        exchange for exchange in deployment.exchanges(work) if exchange.collective.axis == "expert"
    ]
    gathered = Dispatch(
        "all-gather",
        sum(
            exchange.collective.count * exchange.bytes * (chips - 1) / chips for exchange in gathers
        ),
        sum(exchange.seconds for exchange in gathers),
    )
    tokens = work.num_tokens * roofline.fullest(max(1, work.num_requests), mesh)
    links = chips - 1 if chip.link_axes == 1 else chips * chips // 4
    sent = seconds = 0.0
    for layer in deployment.config.layers:
        if isinstance(layer.ffn, Experts):
            width = layer.ffn.met_width(deployment.config)
            one_way = deployment.formats.rest.bytes_for(width, width)
            token = one_way + _WORD * (2 * layer.ffn.top_k + width)
            pair_bytes = tokens * chance_of_chip(layer.ffn, chips) * token + _WORD
            sent += (chips - 1) * pair_bytes
            seconds += links * pair_bytes * chip.link_axes / chip.link_bandwidth
            seconds += 3 * (chips - 1) * chip.link_latency_s
    return gathered, Dispatch("all-to-all", sent, seconds)
