"""What is served, as the planner's page computes with it."""

import dataclasses

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cost
from inference.planner.calibration import lookup, store
from inference.planner.page import render
from inference.server.frames import PlanFacts
from layers.kernels.device import target_device


def plan_facts(config: Config) -> PlanFacts:
    """The model in the formats in which its weights and its cache lie, as full as it can get."""
    model = config.model
    start: dict[str, str | float] = {
        "batch": config.engine.max_seqs,
        "context": config.max_context // 2,
        "chips": config.mesh.model,
        "expert": config.mesh.expert,
        "cache": model.cache_dtype,
    }
    stored = cost.weight_formats(model)
    if len(stored) == 1:
        (start["weights"],) = stored
    machine = _machine(config)
    return PlanFacts(
        render.describe(dataclasses.replace(model, formats=())),
        None if machine is None else render.describe_chip(machine),
        start,
    )


def _machine(config: Config) -> HardwareSpec | None:
    """As far as it is known: a processor is not measured while requests wait."""
    if target_device().platform != "cpu":
        return lookup.this_machine_or_none(config.model.dtype)
    return store.calibration(config.model) or store.read()
