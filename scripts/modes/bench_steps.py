"""`bench --decode`: decode steps beside what they should take."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

from configs.engine import Config
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark import steps
from inference.checkpoints import weight_formats
from inference.planner import report
from inference.planner.calibration import lookup
from inference.runtime.model_runner import for_this_device
from scripts import common
from scripts.flags import json_lines_flag
from scripts.reports import steps_text

_LARGEST = 1 << 20


def run(
    points: Sequence[str], open_: Callable[[Any], Any], repeats: int, with_engine: bool
) -> None:
    """A row a point.

    Args:
        points: "sequences x context" each.
        open_: a resolved model -> its checkpoint, or None.
        repeats: medians are reported.
        with_engine: also what the engine adds.
    """
    asked = [_point(text) for text in points]
    resolved, config = common.resolve_config({})
    common.check_one_chip(config, "--decode")
    configs = [steps.sizes(config, *each) for each in asked]
    checkpoint = open_(resolved)
    if checkpoint is not None or config.engine.weights is not None:  # formats decide what fits
        device, _ = for_this_device(config)
        if checkpoint is None:
            chosen = weight_formats.drawn(device)
        else:
            chosen, _ = weight_formats.choose(device, checkpoint, config.engine.linear)
        configs = [dataclasses.replace(own, model=chosen.model) for own in configs]
        config = dataclasses.replace(config, model=chosen.model)
    hardware = lookup.this_machine(config.model.dtype, model=config.model)
    rows: list[dict[str, Any]] = []
    result = {
        "decode_steps": rows,
        "hardware": dataclasses.asdict(hardware),
        "predicted_by": report.predicted_by(hardware),
    }
    loaded = None  # parameters, and the model that declares them
    for own, (count, context) in zip(configs, asked, strict=True):
        needed = steps.needed_bytes(own)
        row: dict[str, Any] = {"rows": count, "context": context, "needed_bytes": needed}
        if needed < hardware.memory_bytes:
            engine = _engine(own, checkpoint, loaded)
            loaded = engine.model_runner.params, engine.config.model
            row |= dataclasses.asdict(steps.decode(engine, context, hardware, repeats, with_engine))
            del engine  # frees its cache for the next
            gc.collect()
        rows.append(row)
        json_lines_flag.print_line(result)
    if json_lines_flag.is_json():
        common.print_json(result, config)
    else:
        print("\n".join(steps_text.table(rows, hardware)))


def _engine(config: Config, checkpoint: Any, loaded: tuple[Any, ModelConfig] | None) -> Any:
    """An engine with weights that were loaded before, or else its own."""
    if loaded is None:
        return common.load_engine(checkpoint, config)
    from inference.engine import Engine

    params, model = loaded
    return Engine(dataclasses.replace(config, model=model), params)


def _point(text: str) -> tuple[int, int]:
    """'16x1024' -> (16, 1024)."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(
        n.isascii() and n.isdigit() and 0 < int(n[:9]) <= _LARGEST and len(n) < 9 for n in numbers
    ):
        raise InputError(
            f"--decode is like 1x1024,16x1024 (sequences x context), not {text[:80]!r}"
        )
    return int(numbers[0]), int(numbers[1])
