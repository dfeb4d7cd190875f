"""The plan of a run on its chips, as lines for people and as JSON for tools."""

import dataclasses
from typing import Any

from configs.engine import Config
from configs.hardware.machines import Hosts
from inference.planner.placement import Placement
from inference.planner.slo import Steady
from scripts.reports.tables import seconds, size


def as_json(plan: Placement) -> dict[str, Any]:
    """What `json` can write."""
    return dataclasses.asdict(plan) | {"total_bytes": plan.memory.total_bytes}


def lines(config: Config, hosts: Hosts, plan: Placement) -> list[str]:
    """What runs where, whether it fits, and what requests see."""
    memory, target = plan.memory, hosts.target
    machine = f", {hosts.machine}" if hosts.machine else ""
    result = [
        f"{config.model.name} on {target.name} ({config.mesh}): {hosts.count} x {hosts.chips} "
        f"chips{machine}",
        f"memory a device: weights {size(memory.weight_bytes)}, cache {size(memory.cache_bytes)}, "
        f"temporaries {size(memory.temporary_bytes)}: {size(memory.total_bytes)} of "
        f"{size(memory.memory_bytes)}",
        f"requests of {plan.context:,} + {plan.new_tokens:,} tokens, predicted (uncalibrated):",
        _point("1 request", plan.alone),
        _point(f"{plan.batch:,} requests", plan.busy),
    ]
    if plan.dollars_per_million is not None:
        result[-1] += f", {plan.dollars_per_million:.3g} $/1M tok"
    return result + [f"note: {warning}" for warning in plan.warnings]


def _point(name: str, point: Steady) -> str:
    return (
        f"  {name}: TTFT {seconds(point.ttft_s)}, TPOT {seconds(point.tpot_s)}, "
        f"{point.output_tok_s:,.0f} tok/s"
    )
