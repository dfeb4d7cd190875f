"""Steps compiled for many absent chips next to the planner's prediction, and what more chips gain.

    .venv-aot-tpu-py311/bin/python -m scripts.reports.scaling

writes the tables of docs/scaling.md, and docs/scaling.svg. The environments with compilers are
those of `make test-aot`; it takes a quarter of an hour on two cores.
"""

import dataclasses
import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import catalog, targets
from configs.mesh import Mesh
from inference.files import local_machine
from inference.planner.compiled import prediction
from inference.scheduling.step_shapes import enumerate_shapes
from scripts.reports import more_chips
from scripts.reports.more_chips import Point
from scripts.reports.pages.markdown import fill, table
from scripts.reports.pages.results import Row
from scripts.reports.tables import yes

SEQUENCES, CONTEXT = 16, 4096  # of a data shard


class Case(NamedTuple):
    """Steps to compile."""

    model: str
    target: str
    mesh: Mesh = Mesh()
    sequences: int = SEQUENCES
    num_layers: int = 0  # the first ones; 0: all of them


_CASES = (
    Case("llama3-8b", "h200"),
    Case("llama3-8b", "v5e:2x4", Mesh(model=8)),
    Case("llama3-8b", "v6e:2x2", Mesh(model=4)),
    Case("llama3-70b", "8xh200", Mesh(model=8)),
    Case("llama3-70b", "v5e:4x8", Mesh(data=2, model=16)),
    Case("llama3-70b", "v5p:2x2x4", Mesh(data=2, model=8)),
)
_CURVES = {  # colors by model and chip
    ("llama3-8b", "h200"): "#332288", ("llama3-8b", "v6e"): "#117733",
    ("llama3-8b", "v5e"): "#88CCEE", ("llama3-70b", "h200"): "#CC6677",
    ("llama3-70b", "v5p"): "#DDCC77", ("llama3-70b", "v5e"): "#AA4499",
}  # fmt: skip
_COUNTS = tuple(2**n for n in range(9))
_STRONG, _WEAK = 64, 16  # sequences of all chips, of each

Points = Mapping[tuple[str, str], Sequence[Point]]


def main() -> None:
    """Predicts, compiles, and writes tables and picture."""
    compiled = [compile_case(case) for case in _CASES]
    strong, weak = (
        {
            (model, chip): scale(
                presets.get(model).config, catalog.get(chip), load, CONTEXT, _COUNTS
            )
            for model, chip in _CURVES
        }
        for scale, load in ((more_chips.strong, _STRONG), (more_chips.weak, _WEAK))
    )
    Path("docs/scaling.svg").write_text(_svg(strong, weak), encoding="utf-8")
    page = Path("docs/scaling.md")
    page.write_text(fill(page.read_text("utf-8"), _blocks(compiled, strong, weak)), "utf-8")


# --- compiled -------------------------------------------------------------------------------------


def predicted(case: Case, num_layers: int = 0) -> prediction.Prediction:
    """Predicts memory; of another number of layers where one is given."""
    target, model = targets.parse(case.target), presets.get(case.model).config
    model = dataclasses.replace(model, num_layers=num_layers or case.num_layers or model.num_layers)
    engine = EngineConfig(max_seqs=case.sequences, max_context=CONTEXT)
    config = Config(model, engine, case.mesh).for_platform(target.platform, target.pads_bytes)
    config = config.with_engine(cache_bytes=config.full_bytes(case.sequences))
    return prediction.predict(config, target, enumerate_shapes(config.engine))


def compile_case(case: Case) -> Row:
    """Prints the prediction, then returns what `scripts.compile --json` prints."""
    plan = predicted(case)
    print(
        f"{case.model} on {case.target} ({case.mesh}), predicted: weights {plan.weight_bytes:,}, "
        f"cache {plan.cache_bytes:,}, temporaries {plan.temporary_bytes:,}", flush=True,
    )  # fmt: skip
    flags = [f"--model={case.model}", f"--target={case.target}", f"--batch={case.sequences}"]
    flags += [f"--context={CONTEXT}", "--json"]
    flags += [f"--mesh={case.mesh}"] if case.mesh != Mesh() else []
    flags += [f"--set=model.num_layers={case.num_layers}"] if case.num_layers else []
    kind = {"gpu": "cuda", "tpu": "tpu"}[targets.parse(case.target).platform]
    command = [_python(kind), "-m", "scripts.compile", *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        sys.exit(ran.stderr)
    compiled: Row = json.loads(ran.stdout)
    print(f"  compiled in {compiled['compile_s']:.0f} s", flush=True)
    for part in ("weight_bytes", "cache_bytes"):
        assert getattr(plan, part) == compiled["predicted"][part]
    return compiled | {"model": case.model, "mesh": str(case.mesh)}


def _python(kind: str) -> str:
    return f".venv-aot-{kind}-py311/bin/python"


def provenance() -> str:
    """Returns date, machine and versions of what compiles."""
    script = (
        "from importlib.metadata import distributions; print(', '.join(sorted(f'{d.name} "
        "{d.version}' for d in distributions() if d.name in ('jax', 'libtpu', "
        "'jax-cuda12-plugin', 'jax-cuda13-plugin'))))"
    )
    versions = [
        subprocess.run([_python(kind), "-c", script], capture_output=True, text=True, check=True)
        for kind in ("cuda", "tpu")
    ]
    joined = "; ".join(run.stdout.strip() for run in versions)
    return f"Compiled {datetime.date.today()} on {local_machine.name()}; {joined}."


# --- the page -------------------------------------------------------------------------------------


def _blocks(compiled: Sequence[Row], strong: Points, weak: Points) -> dict[str, list[str]]:
    blocks = {
        "weights and cache": [provenance(), *arguments_table(compiled)],
        "temporaries and exchange": steps_table(compiled),
    }
    for name, points in (("strong", strong), ("weak", weak)):
        columns = (f"{name.title()}: chips", *(f"{model}, {chip}" for model, chip in _CURVES))
        rows = [(f"{n}", *(_cell(points[curve], n) for curve in _CURVES)) for n in _COUNTS]
        blocks[name] = table(columns, rows)
    return blocks


def arguments_table(compiled: Sequence[Row]) -> list[str]:
    """Formats bytes that stay, as predicted and in every compiled step."""
    columns = (
        "model", "chips", "mesh", "weights", "cache", "slots, inputs", "agree", "padding", "fits",
    )  # fmt: skip
    return table(columns, list(map(_argument_row, compiled)))


def _argument_row(case: Row) -> tuple[str, ...]:
    plan, steps = case["predicted"], [step for step in case["steps"] if "program" in step]
    sizes = plan["weight_bytes"], plan["cache_bytes"]
    head = case["model"], case["target"], case["mesh"], *(f"{size:,}" for size in sizes)
    if not steps:
        return *head, "", "", "", yes(case["fits"])
    arguments = [step["program"]["argument_bytes"] for step in steps]
    agree = all(
        sum(sizes) + step["input_bytes"] == sum(parts.values())
        and (parts["params"], parts["cache"]) == sizes
        for step, parts in zip(steps, arguments, strict=True)
    )
    padding = steps[0]["argument_bytes"] - sum(arguments[0].values())
    tail = f"{steps[0]['input_bytes']:,}", yes(agree), f"{padding:,}", yes(case["fits"])
    return *head, *tail


def steps_table(compiled: Sequence[Row]) -> list[str]:
    """Formats temporaries and the exchange of each step, or why it was refused."""
    columns = (
        "chips", "step", "temporaries", "predicted, largest", "ratio", "collectives, a chip",
        "agree", "launches", "seconds",
    )  # fmt: skip
    rows = []
    for case in compiled:
        plan = case["predicted"]["temporary_bytes"]
        for step in case["steps"]:
            head = f"{case['model']}, {case['target']}", step["name"]
            compile_s = f"{step['compile_s']:.1f}"
            if "program" not in step:
                rows.append(
                    (*head, f"refused: {step['reason']}", f"{plan:,}", *[""] * 4, compile_s)
                )
                continue
            temporaries, exchange = step["temporary_bytes"], step["collectives"]
            listed = ", ".join(
                f"{n['count']} {kind}: {n['bytes']:,}" for kind, n in exchange.items()
            )
            rows.append((
                *head, f"{temporaries:,}", f"{plan:,}", f"{temporaries / plan:.2f}",
                listed or "none", _agreement(exchange, step["predicted_collectives"]),
                f"{sum(step['program']['launches'].values())}", compile_s,
            ))  # fmt: skip
    return table(columns, rows)


def _agreement(exchange: Row, plan: Row) -> str:
    if exchange == plan:
        return "yes"
    num_bytes, planned = (
        {kind: entry["bytes"] for kind, entry in entries.items()} for entries in (exchange, plan)
    )
    return "bytes" if num_bytes == planned else "no"


def _cell(points: Sequence[Point], count: int) -> str:
    for point in points:
        if point.chips == count:
            share = point.exposed_s / point.step_s
            return f"{1e3 * point.step_s:.2f} ({share:.0%}) {point.mesh}"
    return "does not fit"


# --- the picture ----------------------------------------------------------------------------------


def _svg(strong: Points, weak: Points) -> str:
    """Draws two panels over 1 to 256 chips: tokens a second of all of them, and of each."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 400" font-family="sans-serif" '
        'font-size="12"><rect width="1000" height="400" fill="white"/>'
    ]
    totals = {curve: [(p.chips, p.tok_s) for p in strong[curve]] for curve in strong}
    shares = {curve: [(p.chips, p.tok_s / p.chips) for p in weak[curve]] for curve in weak}
    total = f"predicted tokens/s, {_STRONG} sequences in all (strong)"
    share = f"predicted tokens/s a chip, {_WEAK} sequences a chip (weak)"
    parts += _panel(60, total, range(3, 6), totals) + _panel(460, share, range(2, 5), shares)
    for n, ((model, chip), color) in enumerate(_CURVES.items()):
        y = 60 + 20 * n
        parts.append(
            f'<line x1="835" x2="855" y1="{y - 4}" y2="{y - 4}" stroke="{color}" '
            f'stroke-width="2"/><text x="860" y="{y}">{model}, {chip}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    x0: int, title: str, decades: range, curves: Mapping[tuple[str, str], list[tuple[int, float]]]
) -> list[str]:
    y0, width, height = 40, 340, 300
    bottom = y0 + height

    def x(chips: int) -> float:
        return x0 + width * (chips.bit_length() - 1) / (len(_COUNTS) - 1)

    def y(value: float) -> float:
        return bottom - height * (math.log10(value) - decades[0]) / (decades[-1] - decades[0])

    parts = [f'<text x="{x0}" y="24">{title}</text>']
    for count in _COUNTS:
        parts.append(
            f'<line x1="{x(count):.0f}" x2="{x(count):.0f}" y1="{y0}" y2="{bottom}" '
            f'stroke="#ddd"/><text x="{x(count):.0f}" y="{bottom + 18}" '
            f'text-anchor="middle">{count}</text>'
        )
    for decade in decades:
        parts.append(
            f'<line x1="{x0}" x2="{x0 + width}" y1="{y(10**decade):.0f}" y2="{y(10**decade):.0f}" '
            f'stroke="#ddd"/><text x="{x0 - 6}" y="{y(10**decade) + 4:.0f}" '
            f'text-anchor="end">{10**decade:,}</text>'
        )
    middle = f'x="{x0 + width / 2:.0f}" y="{bottom + 38}" text-anchor="middle"'
    parts.append(f"<text {middle}>chips</text>")
    for curve, color in _CURVES.items():
        dots = [(x(chips), y(value)) for chips, value in curves[curve]]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in dots)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in dots]
    return parts


if __name__ == "__main__":
    main()
