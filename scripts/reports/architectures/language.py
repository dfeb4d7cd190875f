"""The section on language: small models of one size, trained on the same code for as many steps."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import absl

from configs.recipes import small
from inference.files import cache_directory
from inference.planner import cost, weights
from scripts.reports.pages.results import Results, Rows, prose, table, when

TASKS = {
    "lm": "attention",
    "based": "Taylor map and window in turn (BASED)",
    "s4": "S4",
    "mamba2": "Mamba-2",
    "hybrid": "Mamba-2, attention in every third layer",
}
ROWS = tuple(TASKS)
TOKENS, WINDOW = 60_000, 512  # of the text that is scored
CONTEXTS = 512, 16_384  # of which bytes are told
HELD_OUT = Path(absl.__file__).parent  # code that no model was trained on


def measure(results: Results, rows: tuple[str, ...]) -> None:
    """Scores what `scripts.train` has left of each task in the cache; what is not there is said."""
    for task in rows:
        recipe = small.RECIPES[task]
        trained = cache_directory.trained(recipe.model.name)
        if not trained.is_dir():
            print(f"no {trained}: python -m scripts.train --task={task}", flush=True)
            continue
        found = _scored(trained)
        results.put(
            "language", task, perplexity=found["perplexity"], tokens=found["tokens"],
            parameters=weights.num_parameters(recipe.model),
            bytes={f"{length}": cost.cache_bytes(recipe.model, length) for length in CONTEXTS},
        )  # fmt: skip


def _scored(model: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("\n".join(path.read_text("utf-8") for path in sorted(HELD_OUT.rglob("*.py"))))
        text.flush()
        command = [
            sys.executable, "-m", "scripts.evaluate", f"--model={model}", f"--text={text.name}",
            f"--max_tokens={TOKENS}", f"--window={WINDOW}", "--json",
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def section(found: Rows) -> list[str]:
    """Losses by architecture, and what each keeps."""
    training = small.RECIPES["lm"].training
    rows = [
        (
            TASKS[task], f"`{task}`", f"{own['parameters'] / 1e6:.2f}",
            f"{math.log(own['perplexity']):.4f}", f"{own['perplexity']:.3f}",
            *(f"{own['bytes'][str(length)] / 1024:,.0f}" for length in CONTEXTS),
        )
        for task, own in found.items()
    ]  # fmt: skip
    columns = (
        "mixers", "`scripts.train --task`", "million parameters", "nats a token", "perplexity",
        *(f"KiB, {length:,} tokens" for length in CONTEXTS),
    )  # fmt: skip
    return [
        "## Language",
        *prose(
            f"Models of one size, {training.steps:,} steps of {training.batch * training.window:,}",
            "tokens of the standard library's code each, with the same vocabulary, order and",
            f"schedule; scored on {next(iter(found.values()))['tokens']:,} tokens of the source of",
            f"`absl`, in windows of {WINDOW}. What a sequence keeps is the planner's count, of",
            f"lengths that these models were not trained for too. {when(found)}.",
        ),
        *table(columns, rows),
    ]
