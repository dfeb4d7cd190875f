"""Compiled steps beside what was planned, as lines for people and as JSON for tools."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.hardware.targets import Target
from configs.mesh import ONE_CHIP, Mesh
from configs.settings import section
from inference.planner.compiled.prediction import Prediction
from inference.planner.compiled.report import CompiledStep, RefusedStep

Step = CompiledStep | RefusedStep
Exchange = dict[str, tuple[int, int]]  # (count, bytes) of collectives by kind


# --- JSON -----------------------------------------------------------------------------------------


def as_json(
    steps: Sequence[Step], predicted: Prediction, exchanges: Sequence[Exchange | None]
) -> dict[str, Any]:
    """Of all steps together, and of each beside the exchange that was predicted."""
    compiled = [each for each in steps if isinstance(each, CompiledStep)]
    return {
        "fits": fits(steps, predicted),
        "predicted_fits": predicted.fits,
        "memory_bytes": predicted.memory_bytes,
        "bytes_per_chip": max((each.total_bytes for each in compiled), default=None),
        "predicted_bytes_per_chip": predicted.total_bytes,
        "predicted": dataclasses.asdict(predicted),
        "collectives": collectives(compiled[0]) if compiled else None,
        "compile_s": sum(each.compile_s for each in steps),
        "steps": [_step(*each) for each in zip(steps, exchanges, strict=True)],
    }


def _step(step: Step, exchange: Exchange | None) -> dict[str, Any]:
    found = dataclasses.asdict(step) | {"name": step.shape.name}
    found["predicted_collectives"] = exchange and {
        kind: {"count": count, "bytes": held} for kind, (count, held) in exchange.items()
    }
    if isinstance(step, CompiledStep):
        found |= {"total_bytes": step.total_bytes, "collectives": collectives(step)}
    return found


def collectives(step: CompiledStep) -> dict[str, dict[str, int]]:
    """Number and bytes by kind."""
    program = step.program
    return {
        kind: {"count": count, "bytes": program.collective_bytes[kind]}
        for kind, count in program.collectives.items()
    }


def fits(steps: Sequence[Step], predicted: Prediction) -> bool:
    """Whether the device holds every step, as it was compiled."""
    return all(
        isinstance(each, CompiledStep) and each.total_bytes <= predicted.memory_bytes
        for each in steps
    )


# --- lines ----------------------------------------------------------------------------------------


def show_prediction(
    config: Config, attention: str, target: Target, mesh: Mesh, predicted: Prediction
) -> None:
    """What is compiled, and what the planner says of it."""
    model, engine = config.model, config.engine
    placed = target.name if mesh == ONE_CHIP else f"{target.name} ({mesh})"
    print(
        f"{model.name} on {placed}: {model.dtype}, {attention}, {engine.max_seqs} sequences of "
        f"{config.max_context:,} tokens"
    )
    print(
        f"predicted, a chip: weights {predicted.weight_bytes:,}, cache {predicted.cache_bytes:,}, "
        f"temporaries {predicted.temporary_bytes:,}: {predicted.total_bytes:,} of "
        f"{predicted.memory_bytes:,} bytes: {_verdict(predicted.fits)}",
        flush=True,
    )


def show_step(step: Step, exchange: Exchange | None) -> None:
    """What the compiler made of one step, and the exchange that was predicted."""
    print(f"\n{step.shape.name}: compiled in {step.compile_s:.1f} s")
    if isinstance(step, RefusedStep):
        print(f"  refused: {step.reason[:400]}", flush=True)
        return
    program = step.program
    held = program.argument_bytes
    weights, cache = held.get("params", 0), held.get("cache", 0)
    rest = sum(held.values()) - weights - cache
    print(
        f"  bytes: weights {weights:,}, cache {cache:,}, slots and inputs {rest:,}, padding "
        f"{step.argument_bytes - sum(held.values()):,}, temporaries {step.temporary_bytes:,}, code "
        f"{step.code_bytes:,}, outputs {step.output_bytes:,}: {step.total_bytes:,}"
    )
    parts = ", ".join(f"{part} {count}" for part, count in program.launches.items())
    print(f"  launches: {program.num_launches} ({parts})")
    print(
        f"  host: {program.num_conditionals} conditionals, {program.num_loops} loops, "
        f"{program.num_outputs} outputs to copy"
    )
    found = {kind: (each["count"], each["bytes"]) for kind, each in collectives(step).items()}
    said = "" if exchange is None else "; predicted " + _exchanged(exchange)
    said = ", as predicted" if exchange == found else said
    hidden = f"; {program.num_hidden} behind other work" if program.num_hidden else ""
    print(f"  collectives: {_exchanged(found)}{said}{hidden}")
    if program.estimated_cycles:
        print(f"  cycles: {program.estimated_cycles:,} by the compiler's estimate, without kernels")
    print(end="", flush=True)


def show_verdict(steps: Sequence[Step], predicted: Prediction) -> None:
    """What follows from all steps."""
    sizes = [each.total_bytes for each in steps if isinstance(each, CompiledStep)]
    largest = f"{max(sizes):,} of {predicted.memory_bytes:,} bytes a chip, " if sizes else ""
    seconds = sum(each.compile_s for each in steps)
    print(f"\n{_verdict(fits(steps, predicted))}: {largest}compiled in {seconds:.1f} s")


def show_written(paths: Sequence[Path], config: Config, target: Target) -> None:
    """Where executables are, and with which settings an engine takes them."""
    size = sum(path.stat().st_size for path in paths)
    defaults = Config(config.model).for_platform(target.platform).engine
    changed = overrides.changed(config.engine, defaults)
    mesh = [f"--mesh={config.mesh}"] if config.mesh.num_chips > 1 else []
    places = section.paths(EngineConfig)
    settings = [shlex.quote(f"--set={places[name]}={value}") for name, value in changed.items()]
    print(
        f"wrote {len(paths)} executables, {size:,} bytes: --executables={paths[0].parent} "
        + " ".join([*mesh, *settings])
    )


def _exchanged(exchange: Exchange) -> str:
    each = (f"{count} {kind} of {held:,} bytes" for kind, (count, held) in exchange.items())
    return ", ".join(each) or "none"


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"
