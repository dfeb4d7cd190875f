"""Times the host's part of a step, without a device: schedule, build, commit."""

import dataclasses
import random
import statistics
import time

from configs.cache import BLOCK_TOKENS
from configs.engine import Config, EngineConfig
from configs.model import ModelConfig
from inference.planner.simulate import simulated_output
from inference.request import SamplingParams
from inference.runtime import batch
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Prefix, Sequence

_PROMPT, _STEPS = 290, 200  # tokens; timed steps, enough for every page to fill several times


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Median seconds of a step in which `num_running` sequences decode, and the 99th percentile."""

    num_running: int
    schedule_s: float
    build_s: float
    commit_s: float
    total_s: float
    total_p99_s: float


def measure(model: ModelConfig, num_running: int) -> HostCost:
    """Times the steps of `num_running` sequences once their prompts are computed."""
    config = _config(model, num_running)
    scheduler = Scheduler(config)
    params = SamplingParams(max_new_tokens=2 * _STEPS, ignore_eos=True)
    rng = random.Random(0)
    for id in range(num_running):
        tokens = [rng.randrange(model.vocab_size) for _ in range(_PROMPT)]
        scheduler.add(Sequence(id, params, tokens, _PROMPT, prefix=Prefix("shared")))
    while len(scheduler.running) < num_running or any(s.is_prefilling for s in scheduler.running):
        _step(scheduler, config)
    steps = [_step(scheduler, config) for _ in range(_STEPS)]
    schedule_s, build_s, commit_s = map(statistics.median, zip(*steps, strict=True))
    totals = sorted(map(sum, steps))
    total_s, total_p99_s = statistics.median(totals), totals[-_STEPS // 100]
    return HostCost(num_running, schedule_s, build_s, commit_s, total_s, total_p99_s)


def _config(model: ModelConfig, num_running: int) -> Config:
    context = -(-(_PROMPT + 2 * _STEPS) // BLOCK_TOKENS) * BLOCK_TOKENS
    engine = EngineConfig.of(
        max_seqs=num_running,
        max_context=context,
        cache_bytes=num_running * sum(model.page_bytes(context)),
    )
    return Config(model, engine)


def _step(scheduler: Scheduler, config: Config) -> tuple[float, float, float]:
    """Seconds of scheduling, building and committing one step."""
    begin = time.perf_counter()
    schedule = scheduler.schedule()
    scheduled = time.perf_counter()
    assert schedule is not None
    batch.build(schedule, config)
    built = time.perf_counter()
    output = simulated_output(schedule)
    returned = time.perf_counter()
    scheduler.commit(schedule, output)
    return scheduled - begin, built - scheduled, time.perf_counter() - returned
