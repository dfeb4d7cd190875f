"""`bench --decode` and `bench --prefill`: steps beside what they should take."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from configs.engine import Config
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.benchmark import steps
from inference.checkpoints import weight_formats
from inference.planner import report
from inference.planner.calibration import lookup
from inference.runtime.model_runner import for_this_device
from scripts import common
from scripts.flags import json_lines_flag
from scripts.reports import steps_text

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.resolve import Resolved
    from inference.engine import Engine
    from layers.params import Params

    Open = Callable[[Resolved], Checkpoint | None]

_LARGEST = 1 << 20


def decode(points: Sequence[str], open_: "Open", repeats: int, with_engine: bool) -> None:
    """Prints a row a point, "sequences x context"; `with_engine` adds the engine's own time."""

    def measure(engine: "Engine", context: int, hardware: HardwareSpec) -> steps.DecodeStep:
        return steps.decode(engine, context, hardware, repeats, with_engine)

    _run(_Mode("--decode", "context", steps.sizes, measure), points, open_)


def prefill(points: Sequence[str], open_: "Open", repeats: int) -> None:
    """A row a point: "prompts x tokens" each; the rest is as of `decode`."""

    def measure(engine: "Engine", tokens: int, hardware: HardwareSpec) -> steps.PrefillStep:
        return steps.prefill(engine, hardware, repeats)

    _run(_Mode("--prefill", "tokens", steps.prefill_sizes, measure), points, open_)


class _Mode(NamedTuple):
    """Decode or prefill; `unit` is that of a point's second number. `sizes` configures an engine
    for a point, `measure` its step.
    """

    flag: str
    unit: str
    sizes: Callable[[Config, int, int], Config]
    measure: "Callable[[Engine, int, HardwareSpec], steps.DecodeStep | steps.PrefillStep]"


def _run(mode: _Mode, texts: Sequence[str], open_: "Open") -> None:
    points = [_point(mode, text) for text in texts]
    resolved, config = common.resolve_config({})
    common.check_one_chip(config, mode.flag)
    configs = [mode.sizes(config, *point) for point in points]
    checkpoint = open_(resolved)
    if checkpoint is not None or config.engine.weights is not None:  # formats decide what fits
        device, _ = for_this_device(config)
        if checkpoint is None:
            chosen = weight_formats.drawn(device)
        else:
            chosen, _ = weight_formats.choose(device, checkpoint, config.engine.kernels.linear)
        configs = [dataclasses.replace(step_config, model=chosen.model) for step_config in configs]
        config = dataclasses.replace(config, model=chosen.model)
    hardware = lookup.this_machine(config.model.dtype, model=config.model)
    rows: list[dict[str, object]] = []
    result = {
        f"{mode.flag.removeprefix('--')}_steps": rows,
        "hardware": dataclasses.asdict(hardware),
        "predicted_by": report.predicted_by(hardware),
    }
    loaded = None  # parameters, and the model that declares them
    for step_config, (count, units) in zip(configs, points, strict=True):
        needed = steps.needed_bytes(step_config)
        row: dict[str, object] = {"rows": count, mode.unit: units, "needed_bytes": needed}
        if needed < hardware.memory_bytes:
            engine = _engine(step_config, checkpoint, loaded)
            loaded = engine.model_runner.params, engine.config.model
            row |= dataclasses.asdict(mode.measure(engine, units, hardware))
            del engine  # frees its cache for the next
            gc.collect()
        rows.append(row)
        json_lines_flag.print_line(result)
    if json_lines_flag.is_json():
        common.print_json(result, config)
    else:
        print("\n".join(steps_text.lines(result)))


def _engine(
    config: Config, checkpoint: "Checkpoint | None", loaded: "tuple[Params, ModelConfig] | None"
) -> "Engine":
    if loaded is None:
        return common.load_engine(checkpoint, config)
    from inference.engine import Engine

    params, model = loaded
    return Engine(dataclasses.replace(config, model=model), params)


def _point(mode: _Mode, text: str) -> tuple[int, int]:
    """'16x1024' -> (16, 1024)."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(
        n.isascii() and n.isdigit() and 0 < int(n[:9]) <= _LARGEST and len(n) < 9 for n in numbers
    ):
        raise InputError(
            f"{mode.flag} is like 1x1024,16x1024 (sequences x {mode.unit}), not {text[:80]!r}"
        )
    return int(numbers[0]), int(numbers[1])
