"""Steps compiled for many chips that are not there beside the planner's word, and what more chips
gain by that word.

    .venv-aot-tpu-py311/bin/python -m scripts.reports.scaling

writes docs/scaling.md and docs/scaling.svg. The environments with compilers are those of
`make test-aot`; it takes a quarter of an hour on two cores.
"""

import dataclasses
import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import catalog, targets
from configs.mesh import Mesh
from inference.files import local_machine
from inference.planner.compiled import prediction
from inference.planner.parallel import scaling
from inference.planner.parallel.scaling import Point
from inference.scheduling.step_shapes import enumerate_shapes

SEQUENCES, CONTEXT = 16, 4096  # of a data shard


class Case(NamedTuple):
    """What is compiled."""

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
_PLOTTED = (
    ("llama3-8b", "h200", "#332288"), ("llama3-8b", "v6e", "#117733"),
    ("llama3-8b", "v5e", "#88CCEE"), ("llama3-70b", "h200", "#CC6677"),
    ("llama3-70b", "v5p", "#DDCC77"), ("llama3-70b", "v5e", "#AA4499"),
)  # fmt: skip
_COUNTS = tuple(2**n for n in range(9))
_STRONG, _WEAK = 64, 16  # sequences of all chips, of each


def main() -> None:
    """Predicts, compiles, and writes both files."""
    found = [compiled(case) for case in _CASES]
    strong, weak = (
        {
            (model, chip): scale(
                presets.get(model).config, catalog.get(chip), load, CONTEXT, _COUNTS
            )
            for model, chip, _ in _PLOTTED
        }
        for scale, load in ((scaling.strong, _STRONG), (scaling.weak, _WEAK))
    )
    Path("docs/scaling.svg").write_text(_svg(strong, weak), encoding="utf-8")
    Path("docs/scaling.md").write_text(_page(found, strong, weak), encoding="utf-8")


# --- compiled -------------------------------------------------------------------------------------


def _python(target: targets.Target) -> str:
    kind = {"gpu": "cuda", "tpu": "tpu"}[target.platform]
    return f".venv-aot-{kind}-py311/bin/python"


def predicted(case: Case, num_layers: int = 0) -> prediction.Prediction:
    """The planner's word, of another number of layers where one is given."""
    target, model = targets.parse(case.target), presets.get(case.model).config
    model = dataclasses.replace(model, num_layers=num_layers or case.num_layers or model.num_layers)
    engine = EngineConfig(max_seqs=case.sequences, max_context=CONTEXT)
    config = Config(model, engine, case.mesh).for_platform(target.platform)
    config = config.with_engine(cache_bytes=config.full_bytes(case.sequences))
    return prediction.predict(config, target, enumerate_shapes(config.engine))


def compiled(case: Case) -> dict[str, Any]:
    """What `scripts.compile --json` says of a case, once the prediction is printed."""
    said = predicted(case)
    print(
        f"{case.model} on {case.target} ({case.mesh}), predicted: weights {said.weight_bytes:,}, "
        f"cache {said.cache_bytes:,}, temporaries {said.temporary_bytes:,}", flush=True,
    )  # fmt: skip
    asked = [f"--model={case.model}", f"--target={case.target}", f"--batch={case.sequences}"]
    asked += [f"--context={CONTEXT}", "--json"]
    asked += [f"--mesh={case.mesh}"] if case.mesh != Mesh() else []
    asked += [f"--set=model.num_layers={case.num_layers}"] if case.num_layers else []
    command = [_python(targets.parse(case.target)), "-m", "scripts.compile", *asked]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        sys.exit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    print(f"  compiled in {found['compile_s']:.0f} s", flush=True)
    assert (said.weight_bytes, said.cache_bytes) == (
        found["predicted"]["weight_bytes"], found["predicted"]["cache_bytes"],
    )  # fmt: skip
    return found | {"model": case.model, "mesh": str(case.mesh)}


def jax_version(platform: str) -> str:
    """Of what compiles for 'cuda' or 'tpu'."""
    code = (
        "from importlib.metadata import distributions; print(', '.join(sorted(f'{d.name} "
        "{d.version}' for d in distributions() if d.name in ('jax', 'libtpu', "
        "'jax-cuda12-plugin', 'jax-cuda13-plugin'))))"
    )
    command = [f".venv-aot-{platform}-py311/bin/python", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- the page -------------------------------------------------------------------------------------

_Points = dict[tuple[str, str], tuple[Point, ...]]
ARGUMENT_HEAD = (
    "| model | chips | mesh | weights | cache | slots, inputs | agree | padding | fits |",
    "|---|---|---|---|---|---|---|---|---|",
)
STEP_HEAD = (
    "| chips | step | temporaries | predicted, largest | ratio | collectives, a chip | agree "
    "| launches | seconds |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _page(found: Sequence[dict[str, Any]], strong: _Points, weak: _Points) -> str:
    versions = "; ".join(map(jax_version, ("cuda", "tpu")))
    lines = [
        "# Scaling", "",
        f"{datetime.date.today()}, on {local_machine.name()}; "
        f"{versions}. Written by", "",
        "    .venv-aot-tpu-py311/bin/python -m scripts.reports.scaling", "",
        "## Compiled for chips that are not there", "",
        f"Steps of {SEQUENCES} sequences of {CONTEXT:,} tokens on each data shard: decoding, "
        "greedy and drawn, and a prefill of 8 x 64 tokens. Bytes are a chip's. Those of weights, "
        "cache, slots and inputs are the planner's and the engine's declarations, and the compiled "
        "programs', which agree to the byte (what a device pads small arrays with is apart). "
        "Seconds are of compiling on the machine above, which did other work, too.", "",
        *ARGUMENT_HEAD, *map(argument_row, found), "",
        "Temporaries, compiled and predicted before, and the exchange of a step:", "",
        *STEP_HEAD, *(row for each in found for row in step_rows(each)), "",
        "Temporaries of the largest step are what is predicted; of TPUs the prediction bounds what "
        "their compiler may fetch ahead (`docs/log.md`). Collectives agree in kinds, numbers and "
        "bytes; where only bytes do, the compiler has joined independent ones.", "",
        "## What more chips gain", "",
        "Predictions, not measurements: the planner's decode step on the fastest mesh that holds "
        f"the load, {CONTEXT:,} tokens a sequence, bfloat16. Exchange that hides behind nothing "
        "is in the step (`planner/parallel/collectives.py`), at the links' data sheets.", "",
        "![weak and strong scaling](scaling.svg)", "",
        f"Strong: {_STRONG} sequences in all. Weak: {_WEAK} sequences a chip. Milliseconds a step, "
        "with the share of exchange, and the mesh.", "",
    ]  # fmt: skip
    for name, points in (("Strong", strong), ("Weak", weak)):
        lines += [
            f"| {name}: chips | " + " | ".join(f"{m}, {c}" for m, c, _ in _PLOTTED) + " |",
            "|---" * (1 + len(_PLOTTED)) + "|",
        ]
        for count in _COUNTS:
            cells = (_cell(points[model, chip], count) for model, chip, _ in _PLOTTED)
            lines.append(f"| {count} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def argument_row(found: dict[str, Any]) -> str:
    """Bytes that stay, as predicted and in every step that was compiled."""
    said, steps = found["predicted"], [step for step in found["steps"] if "program" in step]
    if not steps:
        return (
            f"| {found['model']} | {found['target']} | {found['mesh']} | "
            f"{said['weight_bytes']:,} | {said['cache_bytes']:,} | | | | {_yes(found['fits'])} |"
        )
    held = [step["program"]["argument_bytes"] for step in steps]
    planned = [said["weight_bytes"] + said["cache_bytes"] + each["input_bytes"] for each in steps]
    agree = planned == [sum(own.values()) for own in held] and all(
        (own["params"], own["cache"]) == (said["weight_bytes"], said["cache_bytes"]) for own in held
    )
    padding = steps[0]["argument_bytes"] - sum(held[0].values())
    return (
        f"| {found['model']} | {found['target']} | {found['mesh']} | "
        f"{said['weight_bytes']:,} | {said['cache_bytes']:,} | "
        f"{steps[0]['input_bytes']:,} | {_yes(agree)} | {padding:,} | {_yes(found['fits'])} |"
    )


def step_rows(found: dict[str, Any]) -> list[str]:
    """Temporaries and the exchange of each step, or why it was refused."""
    rows, said = [], found["predicted"]["temporary_bytes"]
    for step in found["steps"]:
        if "program" not in step:
            rows.append(
                f"| {found['model']}, {found['target']} | {step['name']} | refused: "
                f"{step['reason']} | {said:,} | | | | | {step['compile_s']:.1f} |"
            )
            continue
        own, planned = step["collectives"], step["predicted_collectives"]
        same = own == planned, _bytes(own) == _bytes(planned)
        agree = "yes" if same[0] else "bytes" if same[1] else "no"
        listed = ", ".join(f"{n['count']} {kind}: {n['bytes']:,}" for kind, n in own.items())
        rows.append(
            f"| {found['model']}, {found['target']} | {step['name']} | "
            f"{step['temporary_bytes']:,} | {said:,} | {step['temporary_bytes'] / said:.2f} | "
            f"{listed or 'none'} | {agree} | {sum(step['program']['launches'].values())} | "
            f"{step['compile_s']:.1f} |"
        )
    return rows


def _bytes(collectives: dict[str, Any]) -> dict[str, int]:
    return {kind: own["bytes"] for kind, own in collectives.items()}


def _cell(points: Sequence[Point], count: int) -> str:
    for point in points:
        if point.chips == count:
            share = point.exposed_s / point.step_s
            return f"{1e3 * point.step_s:.2f} ({share:.0%}) {point.mesh}"
    return "does not fit"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# --- the picture ----------------------------------------------------------------------------------


def _svg(strong: _Points, weak: _Points) -> str:
    """Two panels over 1 to 256 chips: tokens a second of all of them, and of each."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 400" font-family="sans-serif" '
        'font-size="12"><rect width="1000" height="400" fill="white"/>'
    ]
    total = f"predicted tokens/s, {_STRONG} sequences in all (strong)"
    each = f"predicted tokens/s a chip, {_WEAK} sequences a chip (weak)"
    parts += _panel(60, total, {key: [(p.chips, p.tok_s) for p in strong[key]] for key in strong})
    parts += _panel(
        460, each, {key: [(p.chips, p.tok_s / p.chips) for p in weak[key]] for key in weak}
    )
    for n, (model, chip, colour) in enumerate(_PLOTTED):
        y = 60 + 20 * n
        parts.append(
            f'<line x1="835" x2="855" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="2"/><text x="860" y="{y}">{model}, {chip}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: int, title: str, lines: dict[tuple[str, str], list[tuple[int, float]]]
) -> list[str]:
    top, width, height = 40, 340, 300
    decades = range(3, 6) if "strong" in title else range(2, 5)

    def x(chips: int) -> float:
        return left + width * (chips.bit_length() - 1) / (len(_COUNTS) - 1)

    def y(value: float) -> float:
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return top + height * (1 - share)

    parts = [f'<text x="{left}" y="24">{title}</text>']
    for count in _COUNTS:
        parts.append(
            f'<line x1="{x(count):.0f}" x2="{x(count):.0f}" y1="{top}" y2="{top + height}" '
            f'stroke="#ddd"/><text x="{x(count):.0f}" y="{top + height + 18}" '
            f'text-anchor="middle">{count}</text>'
        )
    for decade in decades:
        level = y(10**decade)
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{level:.0f}" y2="{level:.0f}" '
            f'stroke="#ddd"/><text x="{left - 6}" y="{level + 4:.0f}" '
            f'text-anchor="end">{10**decade:,}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2:.0f}" y="{top + height + 38}" text-anchor="middle">chips'
        "</text>"
    )
    for model, chip, colour in _PLOTTED:
        dots = [(x(chips), y(value)) for chips, value in lines[model, chip]]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in dots)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in dots]
    return parts


if __name__ == "__main__":
    main()
