"""The section on recall: what small models answer from what they were shown, and what they keep."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np

from configs.recipes.training import Recipe
from inference.planner import cost, weights
from inference.training import loop, start
from layers.params import Params
from scripts.reports.pages.markdown import prose, table
from scripts.reports.pages.results import Results, Row, Rows
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes
from scripts.reports.recall import answers, recipes, sequences

ROWS = tuple(recipes.MODELS)
SEEDS = 0, 1, 2
HELD_OUT_ROWS = 64  # sequences of each task


def measure(results: Results, rows: Sequence[str]) -> None:
    """Trains each architecture once a seed, and scores it on sequences that it has not seen."""
    for name in rows:
        model = recipes.MODELS[name]
        results.put(
            "recall", name, runs=[_run(name, seed) for seed in SEEDS],
            parameters=weights.num_parameters(model),
            bytes={f"{length}": cost.cache_bytes(model, length) for length in _lengths()},
        )  # fmt: skip


def _run(name: str, seed: int) -> Row:
    """Trains and evaluates: accuracy by task, and the seconds of all processor cores."""
    began, model, loss = time.process_time(), recipes.MODELS[name], 0.0
    values: Params = {}
    for stage in recipes.stages(model):
        training = dataclasses.replace(stage.training, seed=seed)
        if not values:
            values = start.masters(Recipe(model, training))
        losses: list[float] = []

        def observe(all_losses: np.ndarray, losses: list[float] = losses) -> None:
            losses.append(float(all_losses[-1]))

        data = sequences.Sequences(stage.tasks, training.batch, seed)
        values = loop.train(answers.loss(model), values, data, training, observe=observe)
        loss = statistics.fmean(losses[-20:])
    trained = time.process_time()
    accuracy = {
        _label(task): answers.accuracy(values, model, task, HELD_OUT_ROWS)
        for task in recipes.HELD_OUT
    }
    run = {
        "seed": seed, "loss": loss, "accuracy": accuracy, "training_s": trained - began,
        "seconds": time.process_time() - began,
    }  # fmt: skip
    print(name, run, flush=True)
    return run


def _label(task: recipes.Task) -> str:
    return f"{task.length}/{task.num_pairs}"


def _lengths() -> list[int]:
    return sorted({task.length for task in recipes.HELD_OUT})


def _mean_and_spread(runs: Sequence[Row], label: str) -> tuple[float, float]:
    """Returns the mean over seeds, and half the distance between the best and the worst."""
    shares = [run["accuracy"][label] for run in runs]
    return statistics.fmean(shares), (max(shares) - min(shares)) / 2


def tables(rows: Rows) -> list[str]:
    """Formats accuracy by architecture and task, and what each costs."""
    labels, lengths = [_label(task) for task in recipes.HELD_OUT], _lengths()
    accuracies, costs = [], []
    for name, row in rows.items():
        cells = (_mean_and_spread(row["runs"], label) for label in labels)
        accuracies.append((name, *(f"{mean:.1%} ± {spread:.1%}" for mean, spread in cells)))
        seconds = statistics.fmean(run["training_s"] for run in row["runs"])
        sizes = (f"{row['bytes'][str(length)] / 1024:,.0f}" for length in lengths)
        costs.append((name, f"{row['parameters']:,}", *sizes, f"{seconds:.0f}"))
    total = sum(run["seconds"] for row in rows.values() for run in row["runs"])
    columns = ("", "parameters", *(f"KiB, {length:,} tokens" for length in lengths), "seconds")
    return [
        *table(("of tokens/keys", *labels), accuracies),
        *prose(
            "Bytes that a sequence keeps, by each layer's `CacheSpec` as the planner counts it,",
            "and seconds of processor cores (user and system) that one training took; trainings",
            f"and evaluations took {total / 60:.0f} minutes together.",
        ),
        *table(columns, costs),
    ]


def picture(rows: Rows) -> bytes:
    """Plots recall by bytes at the hardest task, and by the keys of the shortest sequences."""
    hardest = max(recipes.HELD_OUT, key=lambda task: (task.num_pairs, task.length))
    length = min(_lengths())
    tasks = [task for task in recipes.HELD_OUT if task.length == length]

    def draw(by_bytes: Axes, by_keys: Axes) -> None:
        for name, row in rows.items():
            mean, spread = _mean_and_spread(row["runs"], _label(hardest))
            kib = row["bytes"][str(hardest.length)] / 1024
            by_bytes.errorbar(kib, 100 * mean, 100 * spread, fmt="o", label=name)
            means = [100 * _mean_and_spread(row["runs"], _label(task))[0] for task in tasks]
            by_keys.plot([task.num_pairs for task in tasks], means, "o-", label=name)
        by_bytes.set(
            xscale="log", xlabel=f"KiB kept of {hardest.length:,} tokens",
            ylabel=f"answered of {hardest.num_pairs} keys, %", ylim=(-3, 103),
        )  # fmt: skip
        by_keys.set(xlabel=f"keys in {length} tokens", ylim=(-3, 103))
        by_keys.set_xscale("log", base=2)
        by_keys.set_xticks([task.num_pairs for task in tasks], [f"{t.num_pairs}" for t in tasks])
        by_keys.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return figures.png("Recall, and what it takes", draw)
