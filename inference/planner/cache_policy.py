"""What of a prompt is kept: the time of a copy against computing it again; and what that saves."""

import functools
from collections.abc import Callable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import report
from inference.planner.calibration import store
from inference.planner.cost import Rows, Work

# Assumed of a machine that was not calibrated, since a measurement would delay the engine.
NOMINAL = HardwareSpec("nominal", 0, read_bandwidth=10e9, rates={"bfloat16": 1e12})


def offload_policy(config: Config, hardware: HardwareSpec | None = None) -> Callable[[int], bool]:
    """num_tokens -> whether to offload a page that ends after so many tokens. Where `preemption` is
    'auto', two copies of its bytes, there and back, must take less time than computing its tokens
    in a prefill step; of a model with states those of a snapshot and of a full step's pages less
    than that step.

    Args:
        hardware: the machine; None is the calibrated one, or else a nominal one.
    """
    if config.engine.cache.preemption != "auto":
        return lambda num_tokens: True  # 'recompute' has no host pages
    model, page, chunk = config.model, config.page_tokens, config.engine.shapes.chunk_tokens
    num_bytes: float = sum(model.page_bytes(page))
    if model.has_states:
        full = chunk * max(config.engine.shapes.prefill_chunks)
        num_bytes = num_bytes + model.state_bytes * page / full
    machine = hardware or store.calibration(model) or NOMINAL
    copy_s = 2 * num_bytes / (machine.host_bandwidth or machine.read_bandwidth)

    @functools.cache
    def is_cheaper(num_tokens: int) -> bool:
        work = Work(chunk, (Rows(1, chunk, max(chunk, num_tokens)),), 1)
        return copy_s < report.work_seconds(model, work, machine) * page / chunk

    return is_cheaper


def of_caches(
    config: Config, hardware: HardwareSpec | None = None
) -> tuple[Callable[[int], bool], int]:
    """What a scheduler is told of costs: `offload_policy` and `snapshot_tokens`."""
    return offload_policy(config, hardware), snapshot_tokens(config, hardware)


def snapshot_tokens(config: Config, hardware: HardwareSpec | None = None) -> int:
    """Tokens between two snapshots, whole pages: the engine's `snapshot_tokens`, or as many as take
    as long to compute in full steps as a snapshot takes to be made and read, and no fewer than
    a step computes, since a snapshot ends it. 0: the model has no states, or nothing holds any.
    Arguments as of `offload_policy`.
    """
    if config.num_snapshots < 2:
        return 0
    shapes, model, page = config.engine.shapes, config.model, config.page_tokens
    if (distance := config.engine.cache.snapshot_tokens) is not None:
        return -(-distance // page) * page
    machine = hardware or store.calibration(model) or NOMINAL
    copies_s = 4 * model.state_bytes / machine.read_bandwidth  # read and written, there and back
    step = shapes.chunk_tokens * max(shapes.prefill_chunks)
    work = Work.prefill(1, step)
    num_tokens = max(step, step * copies_s / report.work_seconds(model, work, machine))
    return int(-(-num_tokens // page) * page)
