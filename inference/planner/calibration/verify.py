"""Predictions against the clock: steps of many sizes are timed, half of them calibrate the machine,
the other half judge the calibration.

What runs a step is an argument: nothing here knows an engine.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from configs.cache import BLOCK_TOKENS
from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.planner import cost, weights
from inference.planner.calibration import calibrate
from inference.planner.calibration.calibrate import Sample
from inference.planner.cost import Precision, Rows, Work
from inference.scheduling.step_shapes import StepShape

CHUNK_TOKENS = 64
MAX_CONTEXT = 16 * BLOCK_TOKENS
_CACHE_BYTES = 512 << 20
_TRIES, _STEADY = 3, 1.25  # times a point is tried until the bandwidth stays within this factor


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of step: `rows` sequences decode at `context`; or the last `chunks` of a prompt of
    `context` tokens are prefilled (of as many prompts, where that is no longer than a chunk).
    """

    model: ModelConfig
    rows: int
    chunks: int
    context: int
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def shape(self) -> StepShape:
        """The shape of its executable."""
        return StepShape((self.rows, 1), (self.chunks, self.chunk_tokens))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens that the last one of each row or chunk attends to."""
        size = self.chunk_tokens
        if self.rows or self.context <= size:
            return (self.context,) * (self.rows + self.chunks)
        return tuple(self.context - size * before for before in reversed(range(self.chunks)))

    @property
    def sample(self) -> tuple[tuple[cost.Operation, ...], Precision]:
        """The step's operations and its formats."""
        queries = 1 if self.rows else self.chunk_tokens
        rows = tuple(Rows(1, queries, context) for context in self.contexts)
        work = Work(self.shape.num_tokens, rows, self.shape.num_logits)
        return cost.step_operations(self.model, work), Precision.of(self.model)

    @property
    def label(self) -> tuple[str, str, str, int]:
        """Model, type, size and context, as shown to people."""
        size = f"{self.rows} rows" if self.rows else f"{self.chunks} x {self.chunk_tokens} tokens"
        return self.model.name, self.model.dtype, size, self.context


def engine_config(model: ModelConfig) -> Config:
    """The configuration of the engine that runs a model's points."""
    engine = EngineConfig(
        max_seqs=32, max_context=MAX_CONTEXT, chunk_tokens=CHUNK_TOKENS, cache_bytes=_CACHE_BYTES
    )
    return Config(model, engine)


_DECODE = ((2, 64), (2, 512), (2, 2000), (8, 64), (8, 256), (8, 1024), (16, 128), (16, 512),
           (32, 64), (32, 320))  # fmt: skip
_PREFILL = ((1, 64), (1, 512), (1, 2000), (4, 256), (4, 1024), (8, 64), (8, 512), (8, 1024))


def points(models: Sequence[ModelConfig]) -> list[Point]:
    """Decoding and prefill of each model, in both types: every size of the first model in the first
    type, every other of the rest.
    """
    found: list[Point] = []
    for model in models:
        for dtype in ("bfloat16", "float32"):
            every = 2 if found else 1
            typed = dataclasses.replace(model, dtype=dtype)
            found += [Point(typed, rows, 0, context) for rows, context in _DECODE[::every]]
            found += [Point(typed, 0, chunks, context) for chunks, context in _PREFILL[::every]]
    return found


class Runner(Protocol):
    """Steps of an engine on the machine at hand."""

    def run(self, point: Point) -> float:
        """Seconds of one step, which is compiled already."""

    def held_bytes(self, model: ModelConfig) -> tuple[int, int]:
        """Allocated bytes of weights and of cache."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A point, measured and predicted.

    Attributes:
        raw_s: seconds by the clock: the best of each round, the median of the rounds.
        seconds: the same, each round scaled to the bandwidth of the whole run.
        predicted_s: seconds predicted by the calibration.
        roofline_s: seconds predicted by the plain roofline, at full rates.
        is_held_out: whether the calibration was made without it.
    """

    point: Point
    raw_s: float
    seconds: float
    predicted_s: float
    roofline_s: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Error of the calibrated prediction, a share of the measured time; negative: too short."""
        return self.predicted_s / self.seconds - 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of weights and of cache of a model, predicted and allocated."""

    model: ModelConfig
    predicted: tuple[int, int]
    allocated: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found: the calibrated machine, every point, memory, and the lowest and highest
    bandwidth that the probe read (bytes a second).
    """

    hardware: HardwareSpec
    results: tuple[Result, ...]
    memory: tuple[Memory, ...]
    bandwidths: tuple[float, float]

    def errors(self, model: str | None = None, roofline: bool = False) -> tuple[float, float]:
        """Median and 90th percentile of the errors at held-out points (of one model, if given)."""
        chosen = [
            abs(r.roofline_s / r.seconds - 1) if roofline else abs(r.error)
            for r in self.results
            if r.is_held_out and model in (None, r.point.model.name)
        ]
        return statistics.median(chosen), sorted(chosen)[math.ceil(0.9 * len(chosen)) - 1]

    @property
    def is_exact_memory(self) -> bool:
        """Whether exactly the predicted bytes were allocated."""
        return all(each.predicted == each.allocated for each in self.memory)


def verify(
    hardware: HardwareSpec,
    chosen: Sequence[Point],
    runner: Runner,
    probe: Callable[[], float],
    rounds: int = 5,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Verification:
    """Runs every point `rounds` times in random orders, each time between two readings of the
    bandwidth, and calibrates on half of them.

    A time is counted in units of the probe: seconds times the lower of its two readings. Both are
    the best of a few in a row, since neighbours only slow a machine down; a time between readings
    that differ by more than a quarter is taken again, twice at most.

    Args:
        hardware: the machine with its rates; its bandwidth and constants are found here.
        chosen: at least four.
        runner: runs their steps.
        probe: bytes a second that the machine reads now.
        rounds, repeats: a point's time is the median over rounds of the best of its repeats.
        seed: of the orders, and of which half is held out.
        progress: told of (done, total, label).
    """
    rng, order = random.Random(seed), list(range(len(chosen)))
    raw: list[list[float]] = [[] for _ in chosen]
    units: list[list[float]] = [[] for _ in chosen]
    readings: list[float] = []
    for round_index in range(rounds):
        rng.shuffle(order)
        for done, index in enumerate(order):
            progress(round_index * len(chosen) + done, rounds * len(chosen), "timing steps")
            runner.run(chosen[index])  # what another point left in the caches is not its own
            seconds, reading = _bracketed(chosen[index], runner, probe, repeats)
            readings.append(reading)
            raw[index].append(seconds)
            units[index].append(seconds * reading)
    bandwidth = statistics.median(readings)
    machine = dataclasses.replace(hardware, read_bandwidth=bandwidth)
    samples = [
        Sample(*point.sample, statistics.median(counted) / bandwidth)
        for point, counted in zip(chosen, units, strict=True)
    ]
    held_out = set(order[1::2])
    calibrated = calibrate.fit(machine, [s for i, s in enumerate(samples) if i not in held_out])
    results = tuple(
        Result(
            point, statistics.median(times), sample.seconds, calibrate.predict(sample, calibrated),
            calibrate.predict(sample, machine), index in held_out,
        )
        for index, (point, times, sample) in enumerate(zip(chosen, raw, samples, strict=True))
    )  # fmt: skip
    models = {point.model: None for point in chosen}
    held = tuple(Memory(m, predicted_bytes(m), runner.held_bytes(m)) for m in models)
    return Verification(calibrated, results, held, (min(readings), max(readings)))


def _bracketed(
    point: Point, runner: Runner, probe: Callable[[], float], repeats: int
) -> tuple[float, float]:
    """Seconds of a step, and the lower of the two bandwidths read around it."""
    reading = probe()
    for _ in range(_TRIES):
        before, seconds = reading, min(runner.run(point) for _ in range(repeats))
        reading = probe()
        if max(before, reading) <= _STEADY * min(before, reading):
            break
    return seconds, min(before, reading)


def predicted_bytes(model: ModelConfig) -> tuple[int, int]:
    """Bytes of weights and of cache of the engine that runs a model's points."""
    formats = Precision.of(model)
    held = weights.weight_bytes(model, formats.weights, formats.rest)
    return int(held), engine_config(model).pool_bytes


def as_json(found: Verification) -> dict[str, Any]:
    """Everything as plain data."""
    names = ("model", "dtype", "size", "context")
    median, p90 = found.errors()
    return {
        "rows": [
            dict(zip(names, result.point.label, strict=True))
            | {"measured_s": result.seconds, "clock_s": result.raw_s}
            | {"predicted_s": result.predicted_s, "roofline_s": result.roofline_s}
            | {"held_out": result.is_held_out}
            for result in found.results
        ],
        "memory": [
            {"model": each.model.name, "dtype": each.model.dtype}
            | {"predicted_weight_bytes": each.predicted[0], "weight_bytes": each.allocated[0]}
            | {"predicted_cache_bytes": each.predicted[1], "cache_bytes": each.allocated[1]}
            for each in found.memory
        ],
        "median_error": median,
        "p90_error": p90,
        "hardware": dataclasses.asdict(found.hardware),
    }
