"""Data of the served model for the planner's page."""

import dataclasses

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cost
from inference.planner.page import render
from inference.server.frames import PlanFacts


def plan_facts(config: Config, machine: HardwareSpec | None) -> PlanFacts:
    """The model in its formats, its mesh, and the largest batch. `machine`: this one, if known."""
    model = config.model
    start: dict[str, str | float] = {
        "batch": config.engine.max_seqs,
        "context": config.max_context // 2,
        "chips": config.mesh.model,
        "expert": config.mesh.expert,
        "context_chips": config.mesh.context,
        "cache": model.cache_dtype,
    }
    stored = cost.weight_formats(model)
    if len(stored) == 1:
        (start["weights"],) = stored
    return PlanFacts(
        render.describe(dataclasses.replace(model, formats=())),
        None if machine is None else render.describe_chip(machine),
        start,
    )
