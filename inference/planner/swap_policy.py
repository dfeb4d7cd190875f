"""Whether a page that leaves the device is kept on the host, by what a copy and its tokens cost."""

import functools
from collections.abc import Callable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cost, report
from inference.planner.calibration import calibrate
from inference.planner.cost import Rows, Work

# What is assumed of a machine that was not calibrated: a measurement would hold up the engine.
_NOMINAL = HardwareSpec("nominal", 0, read_bandwidth=10e9, rates={"bfloat16": 1e12})


def spills(config: Config, hardware: HardwareSpec | None = None) -> Callable[[int], bool]:
    """Tells of a page that ends at a position (tokens before it) whether it is worth a copy on the
    host. Where `engine.preemption` is 'auto', two copies of its bytes, there and back, must take
    less time than computing its tokens in a prefill step.

    Args:
        config: model and engine.
        hardware: the machine; None is as it was calibrated, or else a nominal one.
    """
    if config.engine.preemption != "auto":
        return lambda num_tokens: True  # 'recompute' has no memory there to begin with
    model, page = config.model, config.page_tokens
    num_bytes = sum(group.bytes_per_page(model.dtype, page) for group in model.page_groups)
    machine = hardware or calibrate.read() or _NOMINAL
    copy_s = 2 * num_bytes / (machine.host_bandwidth or machine.read_bandwidth)
    tile = config.engine.tile_tokens

    @functools.cache
    def is_cheaper(num_tokens: int) -> bool:
        work = Work(tile, (Rows(1, tile, max(tile, num_tokens)),), 1)
        recompute_s = report.seconds(model, cost.step_operations(model, work), machine)
        return copy_s < recompute_s * page / tile

    return is_cheaper
