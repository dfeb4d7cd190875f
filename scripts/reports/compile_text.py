"""Compiled steps beside what was planned, as lines for people and as JSON for tools."""

import dataclasses
import shlex
from collections.abc import Sequence
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
    compiled = [step for step in steps if isinstance(step, CompiledStep)]
    return {
        "fits": fits(steps, predicted),
        "predicted_fits": predicted.fits,
        "memory_bytes": predicted.memory_bytes,
        "bytes_per_chip": max((step.total_bytes for step in compiled), default=None),
        "predicted_bytes_per_chip": predicted.total_bytes,
        "predicted": dataclasses.asdict(predicted),
        "collectives": collectives(compiled[0]) if compiled else None,
        "compile_s": sum(step.compile_s for step in steps),
        "steps": [_step(step, exchange) for step, exchange in zip(steps, exchanges, strict=True)],
    }


def _step(step: Step, exchange: Exchange | None) -> dict[str, Any]:
    result = dataclasses.asdict(step) | {"name": step.shape.name}
    result["predicted_collectives"] = exchange and {
        kind: {"count": count, "bytes": num_bytes} for kind, (count, num_bytes) in exchange.items()
    }
    if isinstance(step, CompiledStep):
        result |= {"total_bytes": step.total_bytes, "collectives": collectives(step)}
    return result


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
        isinstance(step, CompiledStep) and step.total_bytes <= predicted.memory_bytes
        for step in steps
    )


# --- lines ----------------------------------------------------------------------------------------


def show_prediction(
    config: Config, attention: str, target: Target, mesh: Mesh, predicted: Prediction
) -> None:
    """What is compiled, and what the planner says of it."""
    model, engine = config.model, config.engine
    chips = target.name if mesh == ONE_CHIP else f"{target.name} ({mesh})"
    print(
        f"{model.name} on {chips}: {model.dtype}, {attention}, {engine.max_seqs} sequences of "
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
    arguments = program.argument_bytes
    weights, cache = arguments.get("params", 0), arguments.get("cache", 0)
    total = sum(arguments.values())
    inputs, padding = total - weights - cache, step.argument_bytes - total
    print(
        f"  bytes: weights {weights:,}, cache {cache:,}, slots and inputs {inputs:,}, padding "
        f"{padding:,}, temporaries {step.temporary_bytes:,}, code "
        f"{step.code_bytes:,}, outputs {step.output_bytes:,}: {step.total_bytes:,}"
    )
    parts = ", ".join(f"{part} {count}" for part, count in program.launches.items())
    print(f"  launches: {sum(program.launches.values())} ({parts})")
    print(
        f"  host: {program.num_conditionals} conditionals, {program.num_loops} loops, "
        f"{program.num_outputs} outputs to copy"
    )
    compiled = {kind: (entry["count"], entry["bytes"]) for kind, entry in collectives(step).items()}
    predicted = "" if exchange is None else "; predicted " + _exchanged(exchange)
    predicted = ", as predicted" if exchange == compiled else predicted
    hidden = f"; {program.num_hidden} behind other work" if program.num_hidden else ""
    print(f"  collectives: {_exchanged(compiled)}{predicted}{hidden}")
    if program.estimated_cycles:
        print(f"  cycles: {program.estimated_cycles:,} by the compiler's estimate, without kernels")
    print(end="", flush=True)


def show_verdict(steps: Sequence[Step], predicted: Prediction) -> None:
    sizes = [step.total_bytes for step in steps if isinstance(step, CompiledStep)]
    largest = f"{max(sizes):,} of {predicted.memory_bytes:,} bytes a chip, " if sizes else ""
    seconds = sum(step.compile_s for step in steps)
    print(f"\n{_verdict(fits(steps, predicted))}: {largest}compiled in {seconds:.1f} s")


def show_written(names: Sequence[str], size: int, config: Config, target: Target) -> None:
    """Where executables of so many bytes are, and with which settings an engine takes them."""
    defaults = Config(config.model).for_platform(target.platform, target.pads_bytes).engine
    changed = overrides.changed(config.engine, defaults)
    mesh = [f"--mesh={config.mesh}"] if config.mesh.num_chips > 1 else []
    places = section.paths(EngineConfig)
    settings = [shlex.quote(f"--set={places[name]}={value}") for name, value in changed.items()]
    print(
        f"wrote {len(names)} executables, {size:,} bytes: "
        f"--executables={names[0].rpartition('/')[0]} " + " ".join([*mesh, *settings])
    )


def _exchanged(exchange: Exchange) -> str:
    kinds = (f"{count} {kind} of {size:,} bytes" for kind, (count, size) in exchange.items())
    return ", ".join(kinds) or "none"


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"
