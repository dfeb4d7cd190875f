"""`bench --decode`: decode steps beside what they should take."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

from configs.engine import Config
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from inference.benchmark import steps
from inference.planner import calibrate, report
from scripts import common

_LARGEST = 1 << 20


def run(
    points: Sequence[str], open_: Callable[[Any], tuple[Any, Any]], repeats: int, serves: bool
) -> None:
    """A row a point.

    Args:
        points: "sequences x context" each.
        open_: a resolved model -> its checkpoint and tokenizer, or None and None.
        repeats: medians are reported.
        serves: also what the engine adds.
    """
    asked = [_point(text) for text in points]
    resolved, config = common.resolve_config({})
    configs = [steps.sizes(config, *each) for each in asked]
    checkpoint, _ = open_(resolved)
    hardware = calibrate.this_machine(config.model.dtype)
    rows, values = [], None
    for own, (count, context) in zip(configs, asked, strict=True):
        needed = steps.needed_bytes(own)
        row: dict[str, Any] = {"rows": count, "context": context, "needed_bytes": needed}
        if needed < hardware.memory_bytes:
            engine = _engine(own, checkpoint, values)
            values = engine.executor.params
            row |= dataclasses.asdict(steps.decode(engine, context, hardware, repeats, serves))
            del engine  # its cache makes room for the next
            gc.collect()
        rows.append(row)
    result = {
        "decode_steps": rows,
        "hardware": dataclasses.asdict(hardware),
        "predicted_by": report.predicted_by(hardware),
    }
    if common.JSON.value:
        common.print_json(result, config)
    else:
        print("\n".join(table(rows, hardware)))


def _engine(config: Config, checkpoint: Any, values: Any) -> Any:
    """An engine with weights that are there already, or with its own."""
    if values is None:
        return common.load_engine(checkpoint, config)
    from inference.engine import Engine

    return Engine(config, values)


def table(rows: Sequence[dict[str, Any]], hardware: HardwareSpec) -> list[str]:
    """The lines for people."""
    names = ("measured ms", "predicted ms", "ratio", "GB a step", "bandwidth", "engine adds us")
    lines = [f"{'rows x context':>16}" + "".join(f"{name:>16}" for name in names)]
    for row in rows:
        line = f"{row['rows']:>8} x {row['context']:<5}"
        if "measured_s" not in row:
            room = f"{hardware.memory_bytes / 1e9:.1f} GB"
            lines.append(f"{line}  does not fit: {row['needed_bytes'] / 1e9:.1f} GB of {room}")
            continue
        gap = "" if row["gap_s"] is None else f"{1e6 * row['gap_s']:.0f}"
        lines.append(
            f"{line}{1e3 * row['measured_s']:16.3f}{1e3 * row['predicted_s']:16.3f}"
            f"{row['ratio']:16.2f}{row['step_bytes'] / 1e9:16.2f}{row['bandwidth_share']:16.0%}"
            f"{gap:>16}"
        )
    lines.append(
        f"{hardware.name}: {hardware.read_bandwidth / 1e9:.0f} GB/s, measured; predicted by: "
        f"{report.predicted_by(hardware)}"
    )
    return lines


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
