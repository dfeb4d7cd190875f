"""How far apart snapshots of a prompt's states lie: the time of a copy against recomputing."""

from collections.abc import Callable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cost, report
from inference.planner.calibration import store
from inference.planner.cost import Rows, Work
from inference.planner.swap_policy import NOMINAL, offload_policy


def of_caches(
    config: Config, hardware: HardwareSpec | None = None
) -> tuple[Callable[[int], bool], int]:
    """What a scheduler is told of costs: `offload_policy` and `snapshot_tokens`."""
    return offload_policy(config, hardware), snapshot_tokens(config, hardware)


def snapshot_tokens(config: Config, hardware: HardwareSpec | None = None) -> int:
    """Tokens between two snapshots, whole pages: as `engine.snapshot_tokens` says, or as many as
    take as long to compute in full steps as a snapshot takes to be made and read, and no fewer than
    a step computes, since a snapshot ends it. 0: the model has no states, or nothing holds any.

    Args:
        config: model and engine.
        hardware: the machine; None is the calibrated one, or else a nominal one.
    """
    if config.num_snapshots < 2:
        return 0
    engine, model, page = config.engine, config.model, config.page_tokens
    if engine.snapshot_tokens is not None:
        return -(-engine.snapshot_tokens // page) * page
    machine = hardware or store.calibration(model) or NOMINAL
    num_bytes = sum(spec.bytes_per_sequence() for spec in model.cache_specs)
    copies_s = 4 * num_bytes / machine.read_bandwidth  # read and written, there and back
    step = engine.chunk_tokens * max(engine.prefill_chunks)
    work = Work(step, (Rows(1, step, step),), 1)
    step_s = report.seconds(model, cost.step_operations(model, work), machine)
    num_tokens = max(step, step * copies_s / step_s)
    return int(-(-num_tokens // page) * page)
