"""Predictions against the clock: steps of many sizes run, half of them calibrate, half judge.

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
from inference.planner import cost, memory, weights
from inference.planner.calibration import calibrate
from inference.planner.calibration.calibrate import Sample
from inference.planner.cost import Precision, Rows, Work
from inference.scheduling.step_shapes import StepShape

TILE = 64
MAX_CONTEXT = 16 * BLOCK_TOKENS
_CACHE_BYTES = 512 << 20
_TRIES, _STEADY = 3, 1.25  # times a point is tried until the bandwidth stays within this factor


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of step: `rows` sequences decode at `context`; or `tiles` of a prompt that ends at
    `context` are prefilled (of as many prompts, where it is no longer than a tile).
    """

    model: ModelConfig
    rows: int
    tiles: int
    context: int

    @property
    def shape(self) -> StepShape:
        """Its executable."""
        return StepShape((self.rows, 1), (self.tiles, TILE))

    @property
    def contexts(self) -> tuple[int, ...]:
        """What the last token of each row or tile sees."""
        if self.rows or self.context <= TILE:
            return (self.context,) * (self.rows + self.tiles)
        return tuple(self.context - TILE * before for before in reversed(range(self.tiles)))

    @property
    def sample(self) -> tuple[tuple[cost.Operation, ...], Precision]:
        """What the step has to do, and in which formats."""
        queries = 1 if self.rows else TILE
        rows = tuple(Rows(1, queries, context) for context in self.contexts)
        work = Work(self.shape.num_tokens, rows, self.shape.num_logits)
        return cost.step_operations(self.model, work), Precision.of(self.model)

    @property
    def label(self) -> tuple[str, str, str, int]:
        """Model, type, size and context, to be read."""
        size = f"{self.rows} rows" if self.rows else f"{self.tiles} x {TILE} tokens"
        return self.model.name, self.model.dtype, size, self.context


def engine_config(model: ModelConfig) -> Config:
    """The engine on which a model's points run."""
    engine = EngineConfig(
        max_seqs=32, max_context=MAX_CONTEXT, tile_tokens=TILE, cache_bytes=_CACHE_BYTES
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
            found += [Point(typed, 0, tiles, context) for tiles, context in _PREFILL[::every]]
    return found


class Runner(Protocol):
    """Steps of an engine on the machine at hand."""

    def run(self, point: Point) -> float:
        """Seconds of one step, compiled before."""

    def held_bytes(self, model: ModelConfig) -> tuple[int, int]:
        """Bytes of weights and of cache, as allocated."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A point, measured and predicted.

    Attributes:
        raw_s: median over the rounds of the best of each, by the clock.
        seconds: the same with every round at the bandwidth of the whole run.
        predicted_s: by the calibrated model.
        roofline_s: by the longer of reading and computing at full rates.
        is_held_out: the calibration never saw it.
    """

    point: Point
    raw_s: float
    seconds: float
    predicted_s: float
    roofline_s: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Of the calibrated prediction, as a share of the measured time; negative: too short."""
        return self.predicted_s / self.seconds - 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of weights and cache of a model, as predicted and as allocated."""

    model: ModelConfig
    predicted: tuple[int, int]
    allocated: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found: the calibrated machine, every point, memory; and how much the probe
    moved (lowest and highest bracket).
    """

    hardware: HardwareSpec
    results: tuple[Result, ...]
    memory: tuple[Memory, ...]
    bandwidths: tuple[float, float]

    def errors(self, model: str | None = None, roofline: bool = False) -> tuple[float, float]:
        """Median and 90th percentile over the held-out points (of a model)."""
        chosen = [
            abs(r.roofline_s / r.seconds - 1) if roofline else abs(r.error)
            for r in self.results
            if r.is_held_out and model in (None, r.point.model.name)
        ]
        return statistics.median(chosen), sorted(chosen)[math.ceil(0.9 * len(chosen)) - 1]

    @property
    def is_exact_memory(self) -> bool:
        """Whether every predicted byte is an allocated one."""
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
    """Seconds of a step, and the lower reading of the bandwidth around them."""
    reading = probe()
    for _ in range(_TRIES):
        before, seconds = reading, min(runner.run(point) for _ in range(repeats))
        reading = probe()
        if max(before, reading) <= _STEADY * min(before, reading):
            break
    return seconds, min(before, reading)


def predicted_bytes(model: ModelConfig) -> tuple[int, int]:
    """Weights and cache of the engine on which the points run."""
    formats = Precision.of(model)
    held = weights.weight_bytes(model, formats.weights, formats.rest)
    return int(held), memory.pool_bytes(engine_config(model))


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
