"""Predictions against the clock: what a first start calibrates predicts steps of sizes that it did
not time.

What runs a step is an argument: nothing here knows an engine.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Protocol

from configs import adapters
from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from configs.settings.adapters import NO_SLOTS, AdapterConfig
from inference.planner import adapter_cost, cost, weights
from inference.planner.calibration import calibrate
from inference.planner.calibration.calibrate import Sample
from inference.planner.cost import Precision, Rows, Work
from inference.scheduling.step_shapes import StepShape

CHUNK_TOKENS = 64
MAX_CONTEXT = 16 << 10
_ROWS, _CONTEXTS = (1, 2, 8, 32), (512, 4096, MAX_CONTEXT)
# Chunks, and the tokens that they end: short prompts, long ones and the end of longer ones, alone
# and behind 8,192 tokens. (One chunk alone calibrates.)
_CHUNKS = ((2, 128), (8, 512), (8, 2048), (1, 8256), (8, 8704), (8, 10240))
_TRIES = 2  # of a point in a round


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of step: `rows` sequences decode at `context`; or the last `chunks` of a prompt of
    `context` tokens are prefilled (of as many prompts, where that is no longer than a chunk). All
    of them have one of `num_adapters` adapters in slots with this room, if there are any.
    """

    model: ModelConfig
    rows: int
    chunks: int
    context: int
    chunk_tokens: int = CHUNK_TOKENS
    num_adapters: int = 0
    room: AdapterConfig = NO_SLOTS

    @property
    def shape(self) -> StepShape:
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
        formats = Precision.of(self.model)
        added = adapter_cost.operations(
            self.model, self.room, work.num_tokens, self.num_adapters, formats
        )
        return (*cost.step_operations(self.model, work), *added), formats

    @property
    def size(self) -> str:
        """Rows or tokens, as shown to people."""
        size = f"{self.rows} rows" if self.rows else f"{self.chunks} x {self.chunk_tokens} tokens"
        return f"{size}, {self.num_adapters} adapters" if self.num_adapters else size


def engine_config(model: ModelConfig, room: AdapterConfig = NO_SLOTS) -> Config:
    """The configuration of the engine that runs a model's points: with pages for the largest."""
    engine = EngineConfig.of(
        max_seqs=max(_ROWS), max_context=min(MAX_CONTEXT, model.max_context),
        chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    return Config(model, dataclasses.replace(engine, adapters=room)).with_room(max(_ROWS))


def points(model: ModelConfig, room: AdapterConfig = NO_SLOTS) -> list[Point]:
    """Decoding and prefill, as far as the model's context goes: sizes that calibrate nothing; with
    room for adapters also steps that have some.
    """
    decode = [Point(model, rows, 0, context) for rows in _ROWS for context in _CONTEXTS]
    prefill = [Point(model, 0, chunks, context) for chunks, context in _CHUNKS]
    if room.slots:
        decode += [
            Point(model, rows, 0, _CONTEXTS[0], num_adapters=min(rows, room.slots), room=room)
            for rows in _ROWS
        ]
        chunks, context = _CHUNKS[0]
        prefill.append(Point(model, 0, chunks, context, num_adapters=1, room=room))
    return [point for point in decode + prefill if point.context <= model.max_context]


class Runner(Protocol):
    """Steps of an engine on the machine at hand."""

    def run(self, point: Point) -> float:
        """Seconds of one step, which is compiled already."""

    def calibrated(self) -> HardwareSpec | None:
        """The machine as a first start of the engine calibrates it now; None: too slow."""

    def held_bytes(self) -> tuple[int, int]:
        """Allocated bytes of weights and of cache."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A point, measured and predicted.

    Attributes:
        seconds: by the clock: the best of each round's tries, the least of the rounds.
        predicted: seconds predicted by each round's calibration.
        roofline_s: seconds predicted by the plain roofline, at full rates.
    """

    point: Point
    seconds: float
    predicted: tuple[float, ...]
    roofline_s: float

    @property
    def predicted_s(self) -> float:
        """The median of the calibrations' predictions."""
        return statistics.median(self.predicted)

    @property
    def error(self) -> float:
        """Error of that, a share of the measured time; negative: too short."""
        return self.predicted_s / self.seconds - 1

    @property
    def spread(self) -> float:
        """Largest over smallest prediction."""
        return max(self.predicted) / min(self.predicted)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found of a model.

    Attributes:
        hardware: the machine as each round calibrated it.
        calibration_s: seconds that one took, the median.
        results: a point each.
        predicted_bytes, allocated_bytes: of weights and of cache.
    """

    model: ModelConfig
    hardware: tuple[HardwareSpec, ...]
    calibration_s: float
    results: tuple[Result, ...]
    predicted_bytes: tuple[int, int]
    allocated_bytes: tuple[int, int]

    @property
    def weights(self) -> str:
        return weights_name(self.model)


def verify(
    model: ModelConfig,
    runner: Runner,
    room: AdapterConfig = NO_SLOTS,
    rounds: int = 3,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Verification | None:
    """Calibrates the machine anew in each round, as a first start would, and times sizes of steps
    that calibrate nothing, in random orders. Neighbours only slow a machine down: a point's time is
    its least. None where steps are too slow to calibrate.

    Args:
        runner: has the model's steps.
        room: for adapters, of its engine.
        rounds: at least 1.
    """
    rng, order = random.Random(seed), points(model, room)
    least = dict.fromkeys(order, math.inf)
    machines: list[HardwareSpec] = []
    calibration_s: list[float] = []
    for done in range(rounds):
        start = clock()
        machine = runner.calibrated()
        if machine is None:
            return None
        calibration_s.append(clock() - start)
        machines.append(machine)
        rng.shuffle(order)
        for at, point in enumerate(order):
            progress(done * len(order) + at, rounds * len(order), "timing steps")
            least[point] = min(least[point], *(runner.run(point) for _ in range(_TRIES)))
    plain = HardwareSpec(
        machines[0].name,
        machines[0].memory_bytes,
        max(machine.read_bandwidth for machine in machines),
        machines[0].rates,
    )
    samples = {point: Sample(*point.sample, seconds) for point, seconds in least.items()}
    results = tuple(
        Result(
            point,
            sample.seconds,
            tuple(calibrate.predict(sample, machine) for machine in machines),
            calibrate.predict(sample, plain),
        )
        for point, sample in samples.items()
    )
    return Verification(
        model,
        tuple(machines),
        statistics.median(calibration_s),
        results,
        predicted_bytes(model, room),
        runner.held_bytes(),
    )


def predicted_bytes(model: ModelConfig, room: AdapterConfig = NO_SLOTS) -> tuple[int, int]:
    """Bytes of weights, slots of adapters included, and of cache of the engine that runs a model's
    points.
    """
    weight_bytes = int(weights.weight_bytes(model)) + adapters.num_bytes(model, room)
    return weight_bytes, engine_config(model, room).pool_bytes


def weights_name(model: ModelConfig) -> str:
    """The formats of a model's matrices."""
    return "+".join(cost.weight_formats(model)) or model.dtype
