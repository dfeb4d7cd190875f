"""The section on recall: what small models answer of what they were shown, and what they keep."""

import dataclasses
import statistics
import time
from typing import Any

from configs.recipes import recall
from configs.recipes.training import Recipe
from inference.planner import cost, weights
from inference.training import loop, start
from inference.training.recall import answers, sequences
from scripts.reports.pages.results import Results, Rows, prose, table, when
from scripts.reports.plots import figures

ROWS = tuple(recall.MODELS)
SEEDS = 0, 1, 2
HELD_OUT_ROWS = 64  # sequences of each task


def measure(results: Results, rows: tuple[str, ...]) -> None:
    """Trains each architecture once a seed, and asks it for what it was not trained on."""
    for name in rows:
        model = recall.MODELS[name]
        runs = [_run(name, seed) for seed in SEEDS]
        results.put(
            "recall", name, runs=runs, parameters=weights.num_parameters(model),
            bytes={f"{length}": cost.cache_bytes(model, length) for length in _lengths()},
        )  # fmt: skip


def _run(name: str, seed: int) -> dict[str, Any]:
    """A training and its evaluation: accuracy by task, and the seconds of all processor cores."""
    began, model, values, last = time.process_time(), recall.MODELS[name], None, 0.0
    for stage in recall.stages(model):
        training = dataclasses.replace(stage.training, seed=seed)
        if values is None:
            values = start.masters(Recipe(model, training))
        losses: list[float] = []
        data = sequences.Sequences(stage.tasks, training.batch, seed)
        values = loop.train(
            answers.loss(model), values, data, training,
            observe=lambda found, kept=losses: kept.append(float(found[-1])),
        )  # fmt: skip
        last = statistics.fmean(losses[-20:])
    trained = time.process_time()
    accuracy = {
        _label(task): answers.accuracy(values, model, task, HELD_OUT_ROWS)
        for task in recall.HELD_OUT
    }
    found = {
        "seed": seed, "loss": last, "accuracy": accuracy, "training_s": trained - began,
        "seconds": time.process_time() - began,
    }  # fmt: skip
    print(name, found, flush=True)
    return found


def _label(task: recall.Task) -> str:
    return f"{task.length}/{task.num_pairs}"


def _lengths() -> list[int]:
    return sorted({task.length for task in recall.HELD_OUT})


def _mean_and_spread(runs: list[dict[str, Any]], label: str) -> tuple[float, float]:
    """Mean over seeds, and half the distance between the best and the worst."""
    found = [run["accuracy"][label] for run in runs]
    return statistics.fmean(found), (max(found) - min(found)) / 2


def section(found: Rows) -> list[str]:
    """Accuracy by architecture and task, and what each costs."""
    labels, lengths = [_label(task) for task in recall.HELD_OUT], _lengths()
    total = sum(run["seconds"] for own in found.values() for run in own["runs"])
    accuracies, costs = [], []
    for name, own in found.items():
        cells = (_mean_and_spread(own["runs"], label) for label in labels)
        accuracies.append((name, *(f"{mean:.1%} ± {spread:.1%}" for mean, spread in cells)))
        seconds = statistics.fmean(run["training_s"] for run in own["runs"])
        kept = (f"{own['bytes'][str(length)] / 1024:,.0f}" for length in lengths)
        costs.append((name, f"{own['parameters']:,}", *kept, f"{seconds:.0f}"))
    stages = "; then ".join(
        f"{stage.training.steps:,} steps of {stage.training.batch} sequences of "
        f"{stage.tasks[0].length} tokens with "
        + ", ".join(f"{task.num_pairs}" for task in stage.tasks[:-1])
        + f" or {stage.tasks[-1].num_pairs} keys"
        for stage in recall.stages(recall.MODELS["attention"])
    )
    return [
        "## Recall",
        *prose(
            "`A B3 C6 F1 E2 -> A? C? F?`: keys and their values, then keys whose values are asked",
            "for (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927), at",
            "distances by the paper's power law, fillers between.",
            f"{recall.NUM_KEYS} keys and as many values stand for nothing else, and are paired",
            f"anew in each sequence. All models are {recall.WIDTH} wide and begin with the same",
            "layer of short convolutions; two layers of mixers follow (of two names one each),",
            "without feed-forwards and, in attention, without positions. BASED is a Taylor map,",
            "then attention within a window; Mamba norms steps, B and C, as in Jamba. Each is",
            "trained once a seed:",
            f"{stages}, with rates that peak at {_rates('S4')}, and where a layer",
            f"attends to all of the past at {_rates('attention')}: of those tried with one seed",
            "([log](log.md)), the rates by which more is answered. Asked are sequences that no",
            f"training draws, {HELD_OUT_ROWS} of each kind. Means of {len(SEEDS)} seeds, and half",
            f"of what lies between the best and the worst. {when(found)}.",
        ),
        *table(("of tokens/keys", *labels), accuracies),
        *prose(
            "What a sequence of so many tokens keeps, by each layer's `CacheSpec` as the planner",
            "counts it, and the seconds of processor cores (user and system) that one training",
            f"took; all of them with what is asked {total / 60:.0f} minutes.",
        ),
        *table(
            ("", "parameters", *(f"KiB, {length:,} tokens" for length in lengths), "seconds"),
            costs,
        ),
    ]


def _rates(name: str) -> str:
    stages = recall.stages(recall.MODELS[name])
    return " and ".join(f"{stage.training.learning_rate:g}" for stage in stages)


def picture(found: Rows) -> bytes:
    """Recall by bytes at the hardest task, and by the keys of the shortest sequences."""
    hardest = max(recall.HELD_OUT, key=lambda task: (task.num_pairs, task.length))
    length = min(_lengths())
    tasks = [task for task in recall.HELD_OUT if task.length == length]

    def draw(left: Any, right: Any) -> None:
        for name, own in found.items():
            mean, spread = _mean_and_spread(own["runs"], _label(hardest))
            kept = own["bytes"][str(hardest.length)] / 1024
            left.errorbar(kept, 100 * mean, 100 * spread, fmt="o", label=name)
            means = [100 * _mean_and_spread(own["runs"], _label(task))[0] for task in tasks]
            right.plot([task.num_pairs for task in tasks], means, "o-", label=name)
        left.set(
            xscale="log", xlabel=f"KiB kept of {hardest.length:,} tokens",
            ylabel=f"answered of {hardest.num_pairs} keys, %", ylim=(-3, 103),
        )  # fmt: skip
        right.set(xlabel=f"keys in {length} tokens", ylim=(-3, 103))
        right.set_xscale("log", base=2)
        right.set_xticks([task.num_pairs for task in tasks], [f"{t.num_pairs}" for t in tasks])
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return figures.png("Recall, and what it takes", draw)
