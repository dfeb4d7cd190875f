"""Where a configuration has its prompts computed."""

from collections.abc import Iterable

from configs.engine import Config
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
