"""Serves a workload on an engine, and predicts the same by simulation."""

from collections.abc import Callable, Sequence
from typing import Protocol

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.benchmark import drive, metrics
from inference.benchmark.drive import GREEDY, Run, Server
from inference.benchmark.metrics import NO_SLO, SloTargets
from inference.benchmark.requests import TimedRequest
from inference.planner import cache_policy
from inference.planner.simulate import Simulator
from inference.request import SamplingParams
from inference.runtime.model_runner import for_this_device
from inference.scheduling.scheduler import Scheduler

_COMPILED = "/jax/core/compile/backend_compile_duration"


class RebuildableServer(Server, Protocol):
    """A server that can drop what it has cached."""

    def rebuild(self) -> None:
        """Starts over with an empty cache."""


def measure(
    engine: RebuildableServer,
    requests: Sequence[TimedRequest],
    repeats: int,
    concurrency: int | None = None,
    params: SamplingParams = GREEDY,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[Run]:
    """Serves the same requests several times, each time from an empty cache."""
    runs = []
    for _ in range(repeats):
        engine.rebuild()
        clock = drive.WallClock()
        runs.append(drive.drive(engine, requests, clock, concurrency, params, on_progress))
    return runs


def figures(runs: Sequence[Run], slo: SloTargets = NO_SLO) -> dict[str, float]:
    """The median over the runs of every figure.

    Raises:
        InputError: a request failed.
    """
    return metrics.medians([metrics.figures(run, slo) for run in runs])


def predict(
    config: Config,
    requests: Sequence[TimedRequest],
    hardware: HardwareSpec,
    host_s: float = 0.0,
    concurrency: int | None = None,
    params: SamplingParams = GREEDY,
) -> Run:
    """The run that the planner expects of this device, on a simulated clock."""
    config, _ = for_this_device(config)
    scheduler = Scheduler(config, *cache_policy.of_caches(config, hardware))
    simulator = Simulator(config, scheduler, hardware, host_s)
    return drive.drive(simulator, requests, simulator.clock, concurrency, params)


def count_compiles() -> Callable[[], int]:
    """How many executables were compiled since this call, ours or not."""
    import jax

    events: list[str] = []

    def on_event(event: str, duration_secs: float, **more: object) -> None:
        if event == _COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    return lambda: len(events)
