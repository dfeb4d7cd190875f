"""What of a prompt is kept: the time of a copy against computing it again; and what that saves."""

import functools

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.kv_pages.prefix_cache import PageCosts
from inference.planner import report
from inference.planner.calibration import store
from inference.planner.cost import Rows, Work
from sharding import hosts

# Assumed of a machine that was not calibrated, since a measurement would delay the engine.
NOMINAL = HardwareSpec("nominal", 0, read_bandwidth=10e9, rates={"bfloat16": 1e12})


def page_costs(config: Config, hardware: HardwareSpec | None = None) -> PageCosts:
    """What evicted pages cost. Where `preemption` is 'auto', a page is offloaded if two copies of
    its bytes, there and back, take less time than computing its tokens in a prefill step; of a
    model with states those of a snapshot and of a full step's pages less than that step. Its return
    takes the shorter of the two; where nothing can be offloaded, it is computed.

    Args:
        hardware: the machine; None is the calibrated one, or else a nominal one.
    """
    model, page, chunk = config.model, config.page_tokens, config.engine.shapes.chunk_tokens
    num_bytes: float = sum(model.page_bytes(page))
    if model.has_states:
        full = chunk * max(config.engine.shapes.prefill_chunks)
        num_bytes = num_bytes + model.state_bytes * page / full
    machine = hardware or store.calibration(model) or NOMINAL
    copy_s = 2 * num_bytes / (machine.host_bandwidth or machine.read_bandwidth)

    offloads = max(config.num_host_pages) > 1  # page 0 means no page
    is_auto = config.engine.cache.preemption == "auto"

    @functools.cache
    def computed_s(num_tokens: int) -> float:
        work = Work(chunk, (Rows(1, chunk, max(chunk, num_tokens)),), 1)
        return report.work_seconds(model, work, machine) * page / chunk

    def should_offload(num_tokens: int) -> bool:
        return not is_auto or copy_s < computed_s(num_tokens)

    def return_percent(num_tokens: int) -> int:
        return_s = computed_s(num_tokens)
        if offloads and should_offload(num_tokens):
            return_s = min(copy_s, return_s)
        return round(100 * return_s / computed_s(page))

    return PageCosts(should_offload, return_percent)


def of_caches(config: Config, hardware: HardwareSpec | None = None) -> tuple[PageCosts, int]:
    """What a scheduler is told of costs: `page_costs` and `snapshot_tokens`. Several hosts, whose
    schedules must not differ, all assume the nominal machine unless one is named.
    """
    if hardware is None and hosts.current().count > 1:
        hardware = NOMINAL
    return page_costs(config, hardware), snapshot_tokens(config, hardware)


def snapshot_tokens(config: Config, hardware: HardwareSpec | None = None) -> int:
    """Tokens between two snapshots, whole pages: the engine's `snapshot_tokens`, or as many as take
    as long to compute in full steps as a snapshot takes to be made and read, and no fewer than
    a step computes, since a snapshot ends it. 0: the model has no states, or nothing holds any.
    Arguments as of `page_costs`.
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
