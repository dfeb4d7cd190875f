"""Whether rewards teach, and what a gap between trainer and engine is.

    python -m scripts.reports.reinforcement

trains a small model to write eight digits in any order, then by rewards to sort them: with answers
of the weights that learn, and with 1.3 times as many of weights two iterations older, from several
seeds. Then it compares log-probabilities of engines with the trainer's, and writes
docs/results/reinforcement.md. What is trained already is not trained again.
"""

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inference.checkpoints import resolve
from inference.files import cache_directory, local_machine, user_files
from layers import params
from scripts.reports.pages.markdown import bullets, code, prose, table
from scripts.reports.reinforcement import gaps, sorting
from scripts.reports.reinforcement.gaps import Gap

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "reinforcement.md"
_ITERATIONS = {0: 100, 2: 130}  # by staleness
_SEEDS = range(3)
_BATCH, _GROUP = 16, 8
_MAX_NEW_TOKENS = 10
_MODEL = (
    *("model.vocab_size=257", "model.width=128", "model.num_layers=3"),
    *("model.pattern.ffn.width=256", "model.max_context=64"),
    *("training.window=32", "training.steps=20", "training.warmup_steps=5"),
)
_ANSWERS = (
    *("training.window=64", "training.steps=450", "training.batch=16", "training.accumulate=1"),
    *("training.learning_rate=2e-3", "training.warmup_steps=20"),
)
_REWARDS = (
    *("training.reward=exact", "training.window=64", f"training.max_new_tokens={_MAX_NEW_TOKENS}"),
    *(f"training.batch={_BATCH}", f"training.group_size={_GROUP}", "training.accumulate=1"),
    *("training.learning_rate=2e-4", "training.warmup_steps=5"),
    *("engine.max_seqs=128", "engine.shapes.decode_rows=(32,128)"),
)


class Trained(NamedTuple):
    """A run: its iterations' figures, what it printed, and its command."""

    staleness: int
    seed: int
    iterations: list[dict[str, float]]
    held_out: tuple[float, float]  # rewards before and after
    command: str


def main() -> None:
    """Trains, compares and writes the page."""
    folder = cache_directory.trained("sorter")
    folder.mkdir(parents=True, exist_ok=True)
    held_out = sorting.lines(sorting.sorted_only, 256, 2, is_held_out=True)
    in_any_order = sorting.lines(sorting.in_any_order, 4096, 0)
    files = {
        "text.txt": "\n".join("".join(line.values()) for line in in_any_order).encode(),
        "answers.jsonl": sorting.jsonl(in_any_order),
        "prompts.jsonl": sorting.jsonl(sorting.lines(sorting.sorted_only, 4096, 1)),
        "held_out.jsonl": sorting.jsonl(held_out),
    }
    if not (folder / "text.txt").exists():
        user_files.write({folder / name: content for name, content in files.items()})
    answered = "--task=sft", "--model=base", "--data=answers.jsonl"
    commands = [
        _trained(folder, "base", ("--task=lm", "--text=text.txt"), _MODEL)[0],
        _trained(folder, "start", answered, _ANSWERS)[0],
    ]
    runs = [_rewarded(folder, staleness, seed) for staleness in _ITERATIONS for seed in _SEEDS]
    prompts = [line["prompt"] for line in held_out]
    compared = gaps.of_engines(folder / "rewarded-0-0", prompts, _MAX_NEW_TOKENS)
    size = params.num_bytes(resolve.resolve(str(folder / "start")).config.parameters()) / 4
    when = f"{datetime.date.today()}, {local_machine.name()}, Python {sys.version.split()[0]}"
    commands += [run.command for run in runs if run.seed == 0]
    page = _page(runs, compared, when, f"{size / 1e6:.2f} million", commands)
    user_files.write({_PAGE: page.encode()})


def _trained(
    folder: Path, name: str, task: Sequence[str], settings: Sequence[str]
) -> tuple[str, dict[str, float]]:
    """Trains what is missing; returns its command, and what that printed."""
    arguments = [*task, f"--output={name}", *(f"--set={setting}" for setting in settings)]
    printed = folder / f"{name}.json"
    if not printed.exists():
        command = [sys.executable, "-m", "scripts.train", "--json", *_in(folder, arguments)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        user_files.write({printed: done.stdout})
    shown = [f"'{argument}'" if "(" in argument else argument for argument in arguments]
    return " ".join(["python -m scripts.train", *shown]), json.loads(printed.read_text())


def _in(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Arguments whose files lie in a folder."""
    names = ("--text=", "--data=", "--eval_data=", "--model=", "--output=")
    return [
        argument.replace("=", f"={folder}/", 1) if argument.startswith(names) else argument
        for argument in arguments
    ]


def _rewarded(folder: Path, staleness: int, seed: int) -> Trained:
    name = f"rewarded-{staleness}-{seed}"
    files = "--model=start", "--data=prompts.jsonl", "--eval_data=held_out.jsonl"
    settings = (
        *_REWARDS, f"training.staleness={staleness}",
        f"training.steps={_ITERATIONS[staleness]}", f"training.seed={seed}",
    )  # fmt: skip
    command, printed = _trained(folder, name, ("--task=grpo", *files), settings)
    lines = (folder / f"{name}.training" / "iterations.jsonl").read_text().splitlines()
    rewards = printed["held_out_reward_before"], printed["held_out_reward"]
    return Trained(staleness, seed, list(map(json.loads, lines)), rewards, command)


def _page(
    runs: Sequence[Trained], compared: Sequence[Gap], when: str, size: str, commands: Sequence[str]
) -> str:
    lines = [
        "# Reinforcement",
        *prose(
            f"{when}. Written by `python -m scripts.reports.reinforcement`. A model of {size} "
            "parameters learns to write eight digits behind `=`: in a third of the examples they "
            "rise, in a third they fall, and in a third they are repeated. Then it is rewarded "
            "with 1 for digits that rise, else with 0 ([reinforcement](../reinforcement.md))."
        ),
        *code(*commands),
        *prose(
            "Held-out prompts are 256 whose digits sum to a multiple of 10, which no example and "
            "no rewarded prompt has; their answers are greedy."
        ),
        *table(
            (
                "staleness (iterations)",
                "seed",
                "answers",
                "held-out reward before",
                "after",
                "tokens",
                "largest gap (nats)",
                "s sampling",
                "s training",
            ),
            list(map(_row, runs)),
        ),
        *prose(_comparison(runs)),
        "",
        "## Gaps",
        *prose(
            "The largest and the mean |difference| of a sampled token's log-probability between "
            "the engine that samples it and the trainer, which computes in float32, of the "
            "first model:"
        ),
        *table(
            ("engine", "tokens", "largest (nats)", "mean (nats)"),
            [[gap.engine, f"{gap.tokens:,}", *map(_number, gap[2:])] for gap in compared],
        ),
        *bullets(
            "Seconds of sampling and of training overlap where answers are stale: they are not a "
            "run's time."
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(run: Trained) -> list[str]:
    before, after = run.held_out
    return [
        str(run.staleness), str(run.seed), f"{len(run.iterations) * _BATCH * _GROUP:,}",
        f"{before:.3f}", f"{after:.3f}",
        f"{sum(line['tokens'] for line in run.iterations):,}",
        _number(max(line["max_gap"] for line in run.iterations)),
        f"{sum(line['rollout_s'] for line in run.iterations):.0f}",
        f"{sum(line['update_s'] for line in run.iterations):.0f}",
    ]  # fmt: skip


def _comparison(runs: Sequence[Trained]) -> str:
    """What stale answers reach, by 1.3 times as many."""
    fresh, stale = (
        [run.held_out[1] for run in runs if run.staleness == staleness] for staleness in _ITERATIONS
    )
    first, last = _ITERATIONS.values()
    return (
        f"With {last / first:.1f} times the answers, stale ones lead to a mean reward of "
        f"{statistics.fmean(stale):.3f}, those of current weights to {statistics.fmean(fresh):.3f} "
        f"(standard deviations over seeds {statistics.stdev(stale):.3f} and "
        f"{statistics.stdev(fresh):.3f})."
    )


def _number(value: float) -> str:
    return f"{value:.2g}" if value else "0.0"


if __name__ == "__main__":
    main()
