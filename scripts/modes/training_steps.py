"""The steps of a training, with a bar, and a checkpoint where it is interrupted."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from configs.errors import InputError
from configs.recipes.training import TrainingConfig
from scripts import common, interrupts

if TYPE_CHECKING:
    from inference.checkpoints.load import Progress
    from inference.training.loop import Data, Loss, PolicyData
    from inference.training.step_folder import StepFolder
    from layers.params import Params

    Start = Callable[[Progress | None], tuple[Params, Params | None]]

_LAST_PART = 20  # the loss that is reported is the mean of the last 1/20 of the steps


class Trained(NamedTuple):
    """Parameters, what the loss had beside them, the loss of each step, and the median seconds of
    steps that were computed now.
    """

    values: "Params"
    frozen: "Params | None"
    losses: np.ndarray
    step_s: float


def run(
    training: TrainingConfig,
    loss: "Loss",
    start: "Start",
    data: "Data | PolicyData",
    folder: "StepFolder",
) -> Trained:
    """Trains: `loss` and `start` are a `Subject`'s, `data` are batches by step. Raises InputError
    as `loop.train`, or if the run was interrupted.
    """
    from inference.runtime import compilation_cache
    from inference.training import loop

    compilation_cache.enable()
    with common.bars() as progress:
        values, frozen = start(progress)
    losses, times = np.zeros(0, np.float32), [0.0]
    with common.bars() as progress, interrupts.Deferred() as interrupt:
        times[0] = time.perf_counter()

        def observe(so_far: np.ndarray) -> None:
            nonlocal losses
            losses = so_far
            times.append(time.perf_counter())
            done, total = len(losses), training.steps
            label = f"step {done} of {total}, loss {last(losses):.3f}"
            progress(done, total, "training", label)
            if done % training.checkpoint_every == 0:
                common.say(label)

        values = loop.train(
            loss, values, data, training, frozen=frozen, folder=folder, observe=observe,
            stop=lambda: interrupt.requested,
        )  # fmt: skip
    if len(losses) < training.steps:
        raise InputError(
            f"interrupted after step {len(losses)} of {training.steps}: the same command goes on "
            f"from {folder.newest()}"
        )
    return Trained(values, frozen, losses, float(np.median(np.diff(times))))


def last(losses: np.ndarray) -> float:
    return float(losses[-max(len(losses) // _LAST_PART, 1) :].mean())
