"""The first start of a model on a machine: its engine's own steps calibrate what predicts them."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from configs.engine import Config
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference.benchmark import steps
from inference.engine import Engine
from inference.planner import cost, weights
from inference.planner.calibration import lookup, measure, quick, store
from inference.planner.calibration.verify import Point
from inference.runtime.batch import Batch
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.step_shapes import StepShape

_LEAST_BYTES = 64 << 20  # smaller weights stay in a processor's caches: they tell nothing of memory
_FASTER = 1.25  # a machine that reads so much faster than when it was calibrated was busy then
_LONGEST, _TOGETHER = 3 << 10, 24 << 10  # tokens of context: of a row, and of all


def calibration(
    engine: Engine, anew: bool = False, say: Callable[[str], None] = lambda line: None
) -> HardwareSpec | None:
    """The machine at hand as it is calibrated for an engine's model, as slow as it reads now. Where
    it never was, it is calibrated first: within 5 seconds, by steps of the executables that the
    engine has. That is kept for the model in its formats.

    Args:
        engine: without requests. Where its steps are timed, what it has cached is lost.
        anew: calibrate again, since more executables may be there than the last time.
        say: told before steps are timed.

    Returns:
        None where an accelerator computes, or the model is too small or too slow to be timed.
    """
    model = engine.config.model
    if jax.default_backend() != "cpu" or weights.weight_bytes(model) < _LEAST_BYTES:
        return None
    runner = engine.model_runner
    with contextlib.closing(measure.Probe()) as probe:
        spec = store.calibration(model, runner.implementations)
        if spec and not anew and (reading := probe.read()) <= _FASTER * spec.read_bandwidth:
            return lookup.at_bandwidth(spec, reading)
        say(f"timing steps of {model.name}, to predict them from now on")
        try:
            hardware = timed(runner, probe.read)
        finally:
            engine.rebuild()
    if hardware is not None:
        store.write(hardware, model)
    return hardware


def timed(runner: ModelRunner, probe: Callable[[], float]) -> HardwareSpec | None:
    """The machine at hand as a runner's steps show it now; what is cached is lost. None where they
    are too slow.

    Args:
        runner: whose executables are timed.
        probe: bytes a second that the machine reads now.
    """
    model, points = runner.config.model, prepared(runner)
    few = measure.few_bits_rates(cost.weight_formats(model))
    rates = {model.dtype: measure.matmul_rate(model.dtype)} | few
    return quick.calibrated(
        HardwareSpec(
            catalog.THIS_MACHINE,
            measure.this_memory(),
            probe(),
            rates,
            implementations=runner.implementations,
        ),
        list(points),
        lambda point: steps.run(runner, *points[point]),
        probe,
    )


def prepared(runner: ModelRunner) -> dict[Point, tuple[StepShape, tuple[np.ndarray, Batch]]]:
    """Steps that only decode or only prefill, the executables that run them and their arrays; the
    most telling first: what weights cost with one row, a chunk and many rows, then what a long
    context adds. Where padding is free, chunks have the fewest rows beside them, of padding.
    """
    is_free = runner.config.engine.shapes.free_padding
    plain = (
        s for s in runner.executables.shapes if s.decode[1] == 1 and not (s.scored or s.greedy)
    )
    shapes = sorted(plain, key=lambda s: s.num_tokens)
    decode = [shape for shape in shapes if not shape.prefill[0]]
    chunked = [shape for shape in shapes if shape.prefill[0] and (is_free or not shape.decode[0])]
    prefill = list({shape.prefill: shape for shape in reversed(chunked)}.values())[::-1]
    order = [
        *((shape, False) for shape in (*decode[:1], *prefill[:1], *decode[-1:])),
        *((shape, True) for shape in (*prefill[:1], *decode[1:2])),
        *((shape, False) for shape in decode[1:2]),
        *((shape, True) for shape in (*decode[:1], *decode[-1:])),
        *((shape, False) for shape in prefill[:0:-1]),
    ]
    points: dict[Point, tuple[StepShape, tuple[np.ndarray, Batch]]] = {}
    for shape, is_long in dict.fromkeys(order):
        for point in _points(shape, is_long, runner.config):
            with contextlib.suppress(ValueError):  # more pages than there are
                points[point] = shape, steps.arrays(point, runner.config, shape=shape)
                break
    return points


def _points(shape: StepShape, is_long: bool, config: Config) -> Iterator[Point]:
    """Steps of a shape at its shortest context, or at long ones, the longest first."""
    chunks, tokens = shape.prefill
    rows = 0 if chunks else shape.decode[0]
    short = tokens * max(1, chunks)
    longest = min(config.max_context, _LONGEST, _TOGETHER // max(1, rows))
    halves = (_LONGEST >> power for power in range(_LONGEST.bit_length()))
    for context in (n for n in halves if short < n <= longest) if is_long else (short,):
        if context <= config.max_context:
            yield Point(config.model, rows, chunks, context, tokens)
