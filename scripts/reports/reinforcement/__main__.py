"""Whether rewards teach, and what a gap between trainer and engine is.

    python -m scripts.reports.reinforcement

trains a small model to write eight digits in any order, then by rewards to sort them: with answers
of the weights that learn, and of weights two iterations older. Then it compares log-probabilities
of engines with the trainer's, and writes docs/results/reinforcement.md. What is trained already is
not trained again.
"""

import datetime
import itertools
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
_STALENESS = (0, 2)
_LEVELS, _SMOOTHED = (0.4, 0.5, 0.6, 0.7, 0.8), 5  # of the mean reward of so many iterations
_BATCH, _GROUP = 16, 8
_MAX_NEW_TOKENS, _PARTS = 10, 6
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
    *("training.steps=100", f"training.batch={_BATCH}", f"training.group_size={_GROUP}"),
    *("training.accumulate=1", "training.learning_rate=2e-4", "training.warmup_steps=5"),
    *("engine.max_seqs=128", "engine.shapes.decode_rows=(32,128)"),
)


class Trained(NamedTuple):
    """A run: its iterations' figures, what it printed, and its command."""

    staleness: int
    iterations: list[dict[str, float]]
    held_out: tuple[float, float]  # rewards before and after
    command: str

    def answers_until(self, level: float) -> int | None:
        """Answers that were sampled until the smoothed reward reached a level; None: never."""
        rewards = [line["reward"] for line in self.iterations]
        for end in range(_SMOOTHED, len(rewards) + 1):
            if statistics.fmean(rewards[end - _SMOOTHED : end]) >= level:
                return end * _BATCH * _GROUP
        return None


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
    runs = [_rewarded(folder, staleness) for staleness in _STALENESS]
    prompts = [line["prompt"] for line in held_out]
    compared = gaps.of_engines(folder / "rewarded-0", prompts, _MAX_NEW_TOKENS)
    size = params.num_bytes(resolve.resolve(str(folder / "start")).config.parameters()) / 4
    when = f"{datetime.date.today()}, {local_machine.name()}, Python {sys.version.split()[0]}"
    commands += [run.command for run in runs]
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


def _rewarded(folder: Path, staleness: int) -> Trained:
    name = f"rewarded-{staleness}"
    files = "--model=start", "--data=prompts.jsonl", "--eval_data=held_out.jsonl"
    settings = *_REWARDS, f"training.staleness={staleness}"
    command, printed = _trained(folder, name, ("--task=grpo", *files), settings)
    lines = (folder / f"{name}.training" / "iterations.jsonl").read_text().splitlines()
    rewards = printed["held_out_reward_before"], printed["held_out_reward"]
    return Trained(staleness, list(map(json.loads, lines)), rewards, command)


def _page(
    runs: Sequence[Trained], compared: Sequence[Gap], when: str, size: str, commands: Sequence[str]
) -> str:
    count = len(runs[0].iterations)
    ends = [count * part // _PARTS for part in range(_PARTS + 1)]
    parts = [f"{first + 1} to {end}" for first, end in itertools.pairwise(ends)]
    rewards = [
        [str(run.staleness), *(
            f"{statistics.fmean(line['reward'] for line in run.iterations[first:end]):.3f}"
            for first, end in itertools.pairwise(ends)
        )] for run in runs
    ]  # fmt: skip
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
                "held-out reward before",
                "after",
                "answers until it is enough",
                "tokens",
                "largest gap (nats)",
                "s sampling",
                "s training",
            ),  # fmt: skip
            [_row(run) for run in runs],
        ),
        *prose("The mean reward of sampled answers, by iterations:"),
        *table(("staleness", *parts), rewards),
        *prose(
            f"Answers until the mean reward of {_SMOOTHED} iterations first reaches a level, one "
            "run each, so that chance decides some of the differences:"
        ),
        *table(("level", *(f"staleness {run.staleness}" for run in runs), "ratio"), _levels(runs)),
        "",
        "## Gaps",
        *prose(
            "The largest and the mean |difference| of a sampled token's log-probability between "
            "the engine that samples it and the trainer, which computes in float32, of the model "
            "trained with staleness 0:"
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
        str(run.staleness), f"{before:.3f}", f"{after:.3f}",
        f"{len(run.iterations) * _BATCH * _GROUP:,}",
        f"{sum(line['tokens'] for line in run.iterations):,}",
        _number(max(line["max_gap"] for line in run.iterations)),
        f"{sum(line['rollout_s'] for line in run.iterations):.0f}",
        f"{sum(line['update_s'] for line in run.iterations):.0f}",
    ]  # fmt: skip


def _levels(runs: Sequence[Trained]) -> list[list[str]]:
    rows = []
    for level in _LEVELS:
        counts = [run.answers_until(level) for run in runs]
        cells = ["never" if count is None else f"{count:,}" for count in counts]
        first, *_, last = counts
        ratio = "" if first is None or last is None else f"{last / first:.2f}"
        rows.append([f"{level}", *cells, ratio])
    return rows


def _number(value: float) -> str:
    return f"{value:.2g}" if value else "0.0"


if __name__ == "__main__":
    main()
