"""Where a configuration has its prompts computed."""

from collections.abc import Iterable

from configs.engine import Config
from inference import alike
from inference.checkpoints.checkpoint import Checkpoint
from inference.prefill.prefiller import Prefiller
from inference.prefill.remote import RemotePrefill
from inference.prefill.worker import PrefillWorker
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.step_shapes import StepShape


def prefiller(
    config: Config, receiver: ModelRunner, scheduler: Scheduler, expected: Iterable[StepShape]
) -> Prefiller | None:
    """What computes prompts for an engine; None: its own steps do. `expected` steps of a worker
    come first.

    Raises:
        InputError: as `sharding.mesh.for_prefill`, with `prefill.chips`.
    """
    if config.prefill.hosts is not None:
        return RemotePrefill(config, receiver, scheduler)
    return PrefillWorker(config, receiver, expected) if config.prefill.chips else None


def connect(place: Prefiller | None, receiver: ModelRunner, checkpoint: Checkpoint) -> None:
    """Connects to the processes that compute prompts, if these do; raises InputError if one of them
    has something else than the receiver, whose weights are a checkpoint's.
    """
    if isinstance(place, RemotePrefill):
        place.start(alike.of_pages(receiver.config, receiver.implementations, checkpoint))


def forget_aborted(place: Prefiller | None) -> None:
    """Lets processes that compute prompts forget those of ended requests at once: the engine's next
    step may be far. Steps of this process end theirs themselves.
    """
    if isinstance(place, RemotePrefill):
        place.finish_aborted()
