"""The first start of a model on a machine: its engine's own steps calibrate what predicts them."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.benchmark import steps
from inference.engine import Engine
from inference.planner import cost, weights
from inference.planner.calibration import lookup, measure, quick, store
from inference.planner.calibration.verify import Point
from inference.planner.cost import Precision
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.step_shapes import StepShape
from layers import decoder, params

_LEAST_BYTES = 64 << 20  # smaller weights stay in a processor's caches: they tell nothing of memory
_FASTER = 1.25  # a machine that reads so much faster than when it was calibrated was busy then
_LONG_CONTEXTS = (1024, 512, 256)


def calibration(
    engine: Engine, anew: bool = False, say: Callable[[str], None] = lambda line: None
) -> HardwareSpec | None:
    """The machine at hand as it is calibrated for an engine's model, as slow as it reads now. Where
    it never was, it is calibrated first: within 5 seconds, by steps of the executables that the
    engine has. That is kept for the model in its type; what `plan --verify` finds comes first.

    Args:
        engine: without requests. Where its steps are timed, what it has cached is lost.
        anew: calibrate again, since more executables may be there than the last time.
        say: told before steps are timed.

    Returns:
        None where an accelerator computes, or the model is too small or too slow to be timed.
    """
    model, own = engine.config.model, Precision.of(engine.config.model)
    num_bytes = weights.weight_bytes(model, own.weights, own.rest)
    if jax.default_backend() != "cpu" or num_bytes < _LEAST_BYTES:
        return None
    runner, implementations = engine.model_runner, engine.model_runner.implementations
    with contextlib.closing(measure.Probe()) as probe:
        kept, reading = store.calibration(model, implementations), probe.read()
        is_full = store.calibration(implementations=implementations) is not None
        if kept and (is_full or not anew and reading <= _FASTER * kept.read_bandwidth):
            return lookup.at_bandwidth(kept, reading)
        say(f"timing steps of {model.name}, to predict them from now on")
        few = measure.few_bits_rates(cost.weight_formats(model))
        rates = {model.dtype: measure.matmul_rate(model.dtype)} | few
        prepared = _prepared(runner)
        try:
            found = quick.calibrated(
                HardwareSpec(
                    catalog.THIS_MACHINE,
                    measure.this_memory(),
                    reading,
                    rates,
                    implementations=implementations,
                ),
                list(prepared),
                lambda point: steps.run(runner, point.shape, prepared[point]),
                probe.read,
            )
        finally:
            engine.rebuild()
    if found is not None:
        store.write(found, model)
    return found


def of_model(model: ModelConfig) -> HardwareSpec:
    """The machine calibrated anew for a model, with random weights, by a warm engine of its own.

    Raises:
        ValueError: there is nothing to calibrate: see `calibration`.
    """
    values = params.init(decoder.param_infos(model), seed=1)
    engine = Engine(Config(model, EngineConfig(max_seqs=32, max_context=1024)), values)
    engine.warm_up()
    found = calibration(engine, anew=True)
    if found is None:
        raise ValueError(f"{model.name} has no steps to time on a {jax.default_backend()}")
    return found


def _prepared(runner: ModelRunner) -> dict[Point, Any]:
    """Steps that only decode or only prefill, of each executable one at a short context and one at
    a long one, as far as there is room; the most telling first.
    """
    config, found = runner.config, dict[Point, Any]()
    for shape in _most_telling_first(runner.shapes):
        rows, (chunks, tokens) = shape.decode[0], shape.prefill
        short = tokens * max(1, chunks)
        for contexts in ((short,), [context for context in _LONG_CONTEXTS if context > short]):
            for context in contexts:
                point = Point(config.model, rows, chunks, context, tokens)
                if point.shape != shape or context > config.max_context:
                    continue
                with contextlib.suppress(ValueError):  # more pages than there are
                    found[point] = steps.arrays(point, config)
                    break
    return found


def _most_telling_first(shapes: Iterable[StepShape]) -> list[StepShape]:
    """Those that only decode and those that only prefill by turns, the extremes first: the smallest
    of the former (bytes), the largest of the latter (arithmetic), then the other way round.
    """
    unscored = sorted((s for s in shapes if not s.scored), key=lambda s: s.num_tokens)
    decode = [shape for shape in unscored if not shape.prefill[0]]
    prefill = [shape for shape in unscored if not shape.decode[0]]
    pairs = itertools.zip_longest([*decode[:1], *decode[:0:-1]], [*prefill[-1:], *prefill[:-1]])
    return [shape for pair in pairs for shape in pair if shape]
