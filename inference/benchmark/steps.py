"""Times an engine's steps on arbitrary pages, whose values do not change the time, and tokens that
differ from each other: where there are experts, they visit different ones.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from configs.engine import Config
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from inference.benchmark import drive
from inference.benchmark.requests import TimedRequest
from inference.engine import Engine
from inference.planner import cost, report, weights
from inference.planner.calibration.verify import Point
from inference.request import SamplingParams
from inference.runtime import adapter_stacks, batch
from inference.runtime.model_runner import ModelRunner
from inference.scheduling import step_shapes
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_schedule import ScheduledChunk, ShardSchedule
from inference.scheduling.step_shapes import StepShape

IN_A_ROW = 16  # steps of a measurement of decoding
_PREFILLS = 4  # and of prefill
_STRIDE = 7919  # a prime: no token of a step is another's


def arrays(
    point: Point, config: Config, steps: int = 1, shape: StepShape | None = None
) -> tuple[np.ndarray, batch.Batch]:
    """Committed lengths of the slots, and the batch: each sequence on pages of its own, with room
    for that many steps in a row; padded to a larger shape, if one is given.

    Raises:
        ValueError: there are not enough pages.
    """
    page, sink = config.page_tokens, config.engine.max_seqs
    queries = 1 if point.rows else point.chunk_tokens
    num_prompts = 1 if point.chunks and point.context > queries else len(point.contexts)
    fed = queries * len(point.contexts) // num_prompts
    num_tokens, rows = np.zeros(sink + 1, np.int32), []
    free = [1 for _ in config.num_pages]
    for slot in range(num_prompts):
        computed = num_tokens[slot] = point.context - fed
        first_token = slot * (point.context + 1)
        tokens = _tokens(config, np.arange(first_token, first_token + point.context + 1)).tolist()
        sequence = Sequence(slot, SamplingParams(), tokens, computed, slot=slot)
        if point.num_adapters:
            sequence.adapter.slot = slot % point.num_adapters
        for group, pages in enumerate(config.cached_model.page_groups):
            dead = pages.spec.dead_pages(computed, page)  # those were given back
            columns = -(-(point.context + steps - 1) // page)
            count = columns - len(dead)
            if free[group] + count > config.num_pages[group]:
                raise ValueError(
                    f"{point.size} of {point.context} tokens: needs more pages than there are"
                )
            ids = [free[group] + i for i in range(count)]
            sequence.pages.append(ids[: dead.start] + [0] * len(dead) + ids[dead.start :])
            free[group] += count
        rows += [
            ScheduledChunk(sequence, slot, computed + at, at, queries, emits=at + queries == fed)
            for at in range(0, fed, queries)
        ]
    decode, chunks = (tuple(rows), ()) if point.rows else ((), tuple(rows))
    shard_batch = batch.build_batch(shape or point.shape, ShardSchedule(decode, chunks), config)
    return batch.joined(
        [(num_tokens, shard_batch)] * config.mesh.num_groups
    )  # every data shard alike


def _tokens(config: Config, numbers: np.ndarray) -> np.ndarray:
    return numbers * _STRIDE % config.model.vocab_size


def fill_adapters(runner: ModelRunner) -> None:
    """Gives every slot for adapters its largest rank, with factors of zeros: the native products
    skip a slot without ranks. Changes nothing where there are no slots.
    """
    rank = runner.config.engine.adapters.rank
    full = {
        path: (down, up, jax.numpy.full_like(ranks, rank))
        for path, (down, up, ranks) in runner.params.get(adapter_stacks.NAME, {}).items()
    }
    if full:
        runner.params |= {adapter_stacks.NAME: full}


def run(
    runner: ModelRunner,
    shape: StepShape,
    prepared: tuple[np.ndarray, batch.Batch],
    steps: int = 1,
    advances: bool = True,
) -> float:
    """Seconds of a step, from the call to its last output: the mean of several that are launched
    back to back.

    Args:
        prepared: what `arrays` made for it.
        steps: at most as many as `arrays` made room for.
        advances: whether each continues the one before, a token further; else all are the same.
    """
    num_tokens, batch_arrays = prepared
    last_token = _tokens(runner.config, np.arange(len(num_tokens)))
    lengths: list[dict[str, Any]] = [
        {
            "num_tokens": jax.numpy.array(num_tokens),
            "last_token": jax.numpy.array(last_token, jax.numpy.int32),
        }
        for _ in range(1 if advances else steps)
    ]
    jax.block_until_ready((runner.slots, lengths))
    executable, output = runner.compiled(shape), None
    start = time.perf_counter()
    for at in range(steps):
        if at < len(lengths):
            assert runner.slots is not None
            runner.slots = dataclasses.replace(runner.slots, **lengths[at])
        runner.cache, runner.slots, output = executable(
            runner.params, runner.cache, runner.slots, batch_arrays
        )
    jax.block_until_ready((runner.cache, runner.slots, output))
    return (time.perf_counter() - start) / steps


# --- decode and prefill steps, beside what they should take ---------------------------------------


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A decode step of `rows` sequences of `context` tokens.

    Attributes:
        step_bytes: that it reads and writes.
        predicted_s: by the roofline at the device's measured rates.
        measured_s: mean of steps launched back to back, the median over repeats.
        ratio: predicted over measured.
        bandwidth_share: of the measured copy bandwidth.
        engine_s: median of the same steps in the engine, which also schedules and commits them;
            None if not measured.
        gap_s: what the engine adds.
    """

    rows: int
    context: int
    step_bytes: float
    predicted_s: float
    measured_s: float
    ratio: float
    bandwidth_share: float
    engine_s: float | None = None
    gap_s: float | None = None


@dataclasses.dataclass(frozen=True)
class PrefillStep:
    """A step that prefills whole prompts, `rows` of `tokens` tokens, each in one chunk.

    Attributes:
        step_flops: that it computes.
        predicted_s: by the roofline at the device's measured rates.
        measured_s: mean of equal steps launched back to back, the median over repeats: the least
            time to a first token.
        ratio: predicted over measured.
        rate_share: of the rate of the device's products in the model's type.
    """

    rows: int
    tokens: int
    step_flops: float
    predicted_s: float
    measured_s: float
    ratio: float
    rate_share: float


def sizes(config: Config, rows: int, context: int) -> Config:
    """The configuration with room for exactly these sequences, all of which decode together.

    Raises:
        InputError: the context is too short or too long to measure.
    """
    longest = context + IN_A_ROW
    if context <= IN_A_ROW or longest > config.model.max_context:
        raise InputError(
            f"decode steps are measured at contexts from {IN_A_ROW + 1} to the model's "
            f"{config.model.max_context} - {IN_A_ROW}, not at {context}"
        )
    engine = config.engine.replace(
        max_seqs=rows, decode_rows=(rows,), max_context=longest, overcommit=True,
        prefix_cache=False,
        chunked_prefill=False, prefill_chunks=(max(config.engine.shapes.prefill_chunks),),
    )  # fmt: skip
    return Config(config.model, engine).with_room(rows)


def prefill_sizes(config: Config, rows: int, tokens: int) -> Config:
    """The configuration with room for exactly these prompts, all of which one step prefills.

    Raises:
        InputError: the prompts are longer than the model's context, or than a chunk can be.
    """
    if tokens >= config.model.max_context:
        raise InputError(
            f"prefill steps are measured of prompts below the model's context of "
            f"{config.model.max_context} tokens, not of {tokens}"
        )
    engine = config.engine.replace(
        max_seqs=rows, decode_rows=(rows,), max_context=tokens + 1, overcommit=True,
        prefix_cache=False, chunked_prefill=False, chunk_tokens=tokens, prefill_chunks=(rows,),
    )  # fmt: skip
    return Config(config.model, engine).with_room(rows)


def needed_bytes(config: Config) -> float:
    """Bytes of weights and cache."""
    return weights.weight_bytes(config.model) + config.pool_bytes


def decode(
    engine: Engine, context: int, hardware: HardwareSpec, repeats: int, with_engine: bool = False
) -> DecodeStep:
    """Measures a decode step in which all of an engine's sequences take part.

    Args:
        engine: configured by `sizes`.
        context: tokens of each sequence, halfway through the steps.
        repeats: medians are reported.
        with_engine: measure the same in the engine.
    """
    config, rows = engine.config, engine.config.engine.max_seqs
    first = context - IN_A_ROW // 2
    point = Point(config.model, rows, 0, first)
    shape = step_shapes.choose(engine.scheduler.shapes, rows, 0, False, greedy=True)
    prepared = arrays(point, config, IN_A_ROW, shape)
    run(engine.model_runner, shape, prepared)  # compiles
    measured = statistics.median(
        run(engine.model_runner, shape, prepared, IN_A_ROW) for _ in range(repeats)
    )
    needed = Point(config.model, rows, 0, context).sample[0]
    predicted, moved = report.seconds(config.model, needed, hardware), cost.total(needed).bytes
    engine_s = _engine_seconds(engine, first) if with_engine else None
    return DecodeStep(
        rows, context, moved, predicted, measured, predicted / measured,
        moved / measured / hardware.read_bandwidth, engine_s,
        None if engine_s is None else engine_s - measured,
    )  # fmt: skip


def prefill(engine: Engine, hardware: HardwareSpec, repeats: int) -> PrefillStep:
    """Measures the step that prefills a prompt in each of an engine's slots.

    Args:
        engine: configured by `prefill_sizes`.
        repeats: medians are reported.
    """
    model, settings = engine.config.model, engine.config.engine
    rows, chunk = settings.max_seqs, settings.shapes.chunk_tokens
    point = Point(model, 0, rows, chunk, chunk)
    prepared = arrays(point, engine.config)
    run(engine.model_runner, point.shape, prepared)  # compiles
    measured = statistics.median(
        run(engine.model_runner, point.shape, prepared, _PREFILLS, advances=False)
        for _ in range(repeats)
    )
    operations, _ = point.sample
    predicted, flops = report.seconds(model, operations, hardware), cost.total(operations).flops
    return PrefillStep(
        rows, chunk, flops, predicted, measured, predicted / measured,
        flops / measured / hardware.rate(model.dtype),
    )  # fmt: skip


def _engine_seconds(engine: Engine, first: int) -> float:
    """Median seconds of the engine's steps in which every sequence decodes."""
    rows, vocab = engine.config.engine.max_seqs, engine.config.model.vocab_size
    generator = np.random.default_rng(0)
    load = [
        TimedRequest(0.0, tuple(generator.integers(vocab, size=first).tolist()), IN_A_ROW)
        for _ in range(rows)
    ]
    engine.rebuild()
    drive.drive(engine, load, drive.WallClock())  # compiles
    run = drive.drive(engine, load, drive.WallClock())
    return statistics.median(
        record.seconds
        for record in run.records
        if not record.shape.prefill[0] and len(record.rows) == rows
    )
