"""What pruning and healing make of a model: size, quality and speed, beside other ways to them.

    python -m scripts.reports.compression

prunes SmolLM2-135M, heals the child by distillation, does the same with units that stay at random
and with random weights, scores all of them and times their decode steps, and writes
docs/compression.md. A model that is there already is not made again.
"""

import datetime
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inference.files import cache_directory, local_machine, user_files
from scripts.reports.compression.making import (
    HEALED,
    PRUNED,
    RANDOM,
    SCRATCH,
    STEP_TOKENS,
    STEPS,
    TEACHER,
    Models,
)
from scripts.reports.pages.markdown import code, prose, table

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "compression.md"
_HELD_OUT_TOKENS = 8192
_DECODE, _REPEATS = "1x512", 3
_FEWER_BITS = "int8", "int4"


class Score(NamedTuple):
    """Of a model on the held-out text: nats a token, and the divergence from the teacher."""

    loss: float
    divergence: float


class Speed(NamedTuple):
    """Of a decode step of one sequence: bytes of weights, seconds predicted and measured."""

    weight_bytes: float
    predicted_s: float
    measured_s: float


def main() -> None:
    """Makes, scores, times and writes the page."""
    models = Models(cache_directory.trained("compression"))
    pruned = models.pruned()
    stays = [f"{name}={units}" for name, units in pruned["widths"].items()]
    pruned_at_random = models.pruned(RANDOM, f"--widths={','.join(stays)}", "--random")
    healed = models.healed(PRUNED, HEALED)
    healed_at_random = models.healed(RANDOM, f"{RANDOM}-{HEALED}")
    models.random(PRUNED, SCRATCH)
    scratch = models.healed(SCRATCH, f"{SCRATCH}-{HEALED}")
    paths = {name: str(models.path(name)) for name in (
        PRUNED, HEALED, RANDOM, f"{RANDOM}-{HEALED}", f"{SCRATCH}-{HEALED}",
    )}  # fmt: skip
    scores = {name: _score(path) for name, path in paths.items()}
    scores[TEACHER] = _score(TEACHER)
    speeds: dict[tuple[str, str | None], Speed] = {}
    for weights in (None, *_FEWER_BITS):
        for name, path in ((TEACHER, TEACHER), (HEALED, paths[HEALED])):
            speeds[name, weights] = _speed(path, weights)
            if weights is not None:
                scores[f"{name}, {weights}"] = _score(path, weights)
    commands = [figures["command"] for figures in (pruned, healed)]
    minutes = {
        PRUNED: pruned["minutes"],
        HEALED: healed["minutes"],
        RANDOM: pruned_at_random["minutes"] + healed_at_random["minutes"],
        SCRATCH: scratch["minutes"],
    }
    when = f"{datetime.date.today()}, {local_machine.name()}, Python {sys.version.split()[0]}"
    page = _page(when, commands, minutes, pruned, scores, speeds)
    user_files.write({_PAGE: page.encode()})


def _score(model: str, weights: str | None = None) -> Score:
    figures = _printed(
        "scripts.evaluate", f"--model={model}", f"--against={TEACHER}",
        f"--max_tokens={_HELD_OUT_TOKENS}", *_of(weights),
    )  # fmt: skip
    return Score(math.log(figures["perplexity"]), figures["kl"])


def _speed(model: str, weights: str | None) -> Speed:
    """Times decode steps; the median of three."""
    runs = [
        _printed("scripts.bench", f"--model={model}", f"--decode={_DECODE}", *_of(weights))
        for _ in range(_REPEATS)
    ]
    steps = sorted((run["decode_steps"][0] for run in runs), key=lambda step: step["measured_s"])
    step = steps[_REPEATS // 2]
    return Speed(step["needed_bytes"], step["predicted_s"], step["measured_s"])


def _of(weights: str | None) -> list[str]:
    return [] if weights is None else [f"--weights={weights}"]


def _printed(module: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments, "--json"]
    print(*command, file=sys.stderr, flush=True)
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def _page(
    when: str,
    commands: Sequence[Sequence[str]],
    minutes: dict[str, float],
    pruned: dict[str, Any],
    scores: dict[str, Score],
    speeds: dict[tuple[str, str | None], Speed],
) -> str:
    teacher, cost = scores[TEACHER], scores[PRUNED].loss - scores[TEACHER].loss
    recovered = (scores[PRUNED].loss - scores[HEALED].loss) / cost
    share = pruned["parameters"] / pruned["parameters_before"]
    names = {
        TEACHER: "the parent", PRUNED: "the child, pruned", HEALED: "the child, healed",
        RANDOM: "units at random, pruned", f"{RANDOM}-{HEALED}": "units at random, healed",
        f"{SCRATCH}-{HEALED}": "the child's shape, from random weights",
    }  # fmt: skip
    quality = [
        [label, f"{score.loss:.3f}", f"{score.loss - teacher.loss:+.3f}",
         f"{math.exp(score.loss):.2f}", f"{score.divergence:.3f}"]
        for name, label in names.items() for score in (scores[name],)
    ]  # fmt: skip
    plain = speeds[TEACHER, None]
    speed = [
        [names[name], weights or "bfloat16", f"{of_model.weight_bytes / 1e6:.0f}",
         f"{scores[f'{name}, {weights}' if weights else name].loss:.3f}",
         f"{1e3 * of_model.predicted_s:.2f}", f"{1e3 * of_model.measured_s:.2f}",
         f"{plain.predicted_s / of_model.predicted_s:.2f}",
         f"{plain.measured_s / of_model.measured_s:.2f}"]
        for (name, weights), of_model in speeds.items()
    ]  # fmt: skip
    lines = [
        "# Compression",
        *prose(
            f"{when}. Written by `python -m scripts.reports.compression`, which makes a child of "
            f"SmolLM2-135M-Instruct with {share:.1%} of its parameters without embeddings, and "
            f"heals it with {STEPS * STEP_TOKENS} tokens of the docstrings of its own "
            "environment's packages:"
        ),
        *code(*(" ".join(["python", *command]) for command in commands)),
        *prose(
            f"Pruning took {minutes[PRUNED]:.1f} minutes and healing {minutes[HEALED]:.1f}, with "
            "compilation and the teacher's reading of the text."
        ),
        "", "## Quality",
        *prose(
            f"Nats a token of the first {_HELD_OUT_TOKENS} tokens of Python's help topics, which "
            "no training read, and the divergence of the parent's distributions from the "
            f"model's. Healing gave back {recovered:.0%} of the loss that pruning cost. The last "
            "row is trained on the same tokens and distributions from random weights."
        ),
        *table(("model", "nats", "less the parent's", "perplexity", "KL, nats"), quality),
        "", "## Speed",
        *prose(
            "A decode step of one sequence behind 512 tokens, predicted by the planner and the "
            f"median of {_REPEATS} runs; MB are what a step reads."
        ),
        *table(
            ("model", "weights", "MB", "nats", "predicted, ms", "measured, ms",
             "parent's step / step, predicted", "measured"), speed,
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
