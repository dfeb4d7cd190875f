"""Runs on cloud accelerators: what each is predicted to take and to answer, and what was compiled.

    python -m scripts.reports.runs             # predictions; what was compiled stays
    python -m scripts.reports.runs FOLDER      # of NAME.json, as scripts.compile --json prints

writes the table of docs/runs.md. Bytes that were compiled lie in docs/runs.json.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from configs import presets
from configs.engine import Config
from configs.hardware import machines, targets
from configs.recipes import run as runs
from configs.recipes.run import Run
from inference.planner import placement
from scripts.reports.pages.markdown import fill, table
from scripts.reports.tables import seconds, size

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_CONTEXT, _NEW_TOKENS = 2048, 256
_COLUMNS = (
    "run", "model", "chips", "hosts", "mesh", "weights", "memory a device, predicted", "of",
    "compiled", "TTFT, 1 request", "TPOT, 1 request", "requests", "TPOT", "tok/s",
)  # fmt: skip


def main() -> None:
    """Reads new figures of the compiler, and writes the page's table."""
    figures = _DOCS / "runs.json"
    compiled: dict[str, Any] = json.loads(figures.read_text("utf-8")) if figures.exists() else {}
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).glob("*.json")):
            if report := path.read_text("utf-8"):
                compiled[path.stem] = _compiled(json.loads(report))
    figures.write_text(json.dumps(dict(sorted(compiled.items())), indent=1) + "\n", "utf-8")
    page = _DOCS / "runs.md"
    rows = [row(name, run, compiled.get(name)) for name, run in placed().items()]
    page.write_text(fill(page.read_text("utf-8"), {"runs": table(_COLUMNS, rows)}), "utf-8")


def placed() -> dict[str, Run]:
    """The runs that name chips, by their names."""
    folder = _DOCS.parent / "configs" / "runs"
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    modules = {name: importlib.import_module(f"configs.runs.{name}") for name in names}
    return {name: module.RUN for name, module in modules.items() if module.RUN.target}


def _compiled(report: dict[str, Any]) -> dict[str, Any]:
    """What the page keeps of one report."""
    keys = "bytes_per_chip", "predicted_bytes_per_chip", "fits", "target"
    layers = report["config"]["model"]["num_layers"]
    return {key: report[key] for key in keys} | {"num_layers": layers}


def row(name: str, run: Run, compiled: dict[str, Any] | None) -> tuple[str, ...]:
    """A run's cells."""
    assert run.target is not None
    target = targets.parse(run.target)
    hosts = machines.hosts_of(target, run.hosts)
    config = Config(presets.get(run.model).config, run.engine, run.mesh, run.prefill)
    plan = placement.place(runs.stored(config, run.published), target, _CONTEXT, _NEW_TOKENS)
    memory = plan.memory
    measured = "not compiled"
    if compiled is not None:
        measured = size(compiled["bytes_per_chip"])
        if (layers := compiled["num_layers"]) != config.model.num_layers:
            predicted = size(compiled["predicted_bytes_per_chip"])
            measured += f" ({layers} of {config.model.num_layers} layers; predicted {predicted})"
    formats = run.engine.weights or run.published or config.model.dtype
    return (
        f"`{name}`", run.model, target.name, f"{hosts.count} x {hosts.chips}", f"{run.mesh}",
        formats, size(memory.total_bytes), size(memory.memory_bytes), measured,
        seconds(plan.alone.ttft_s), seconds(plan.alone.tpot_s), f"{plan.batch}",
        seconds(plan.busy.tpot_s), f"{plan.busy.output_tok_s:,.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
