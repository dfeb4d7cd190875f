"""`plan --verify`: the engine's own steps on this machine, beside what was predicted."""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from configs.settings.adapters import NO_SLOTS, AdapterConfig
from inference.benchmark import first_start, steps
from inference.checkpoints import weight_formats
from inference.planner.calibration import measure, store, verify
from inference.planner.calibration.verify import Point, Verification
from inference.runtime import compilation_cache
from inference.runtime.batch import Batch
from inference.runtime.model_runner import ModelRunner
from inference.scheduling import step_shapes
from layers import decoder, params

_FORMATS = "int8", "int4"  # of weights, which are verified beside the model's own


class EngineRunner:
    """The steps of a model with random weights, on whose values their time does not depend."""

    def __init__(
        self, model: ModelConfig, room: AdapterConfig, progress: Callable[[int, int, str], None]
    ):
        """Compiles steps that only decode or prefill, and, if padding is free, padded prefill."""
        config = verify.engine_config(model, room)
        self._runner = ModelRunner(config, params.init(decoder.param_infos(model)))
        steps.fill_adapters(self._runner)
        engine = self._runner.config.engine
        self._shapes = [
            shape
            for shape in step_shapes.enumerate_shapes(engine)
            if not shape.scored
            and (engine.shapes.free_padding or 0 in (shape.decode[0], shape.prefill[0]))
        ]
        self._arrays: dict[Point, tuple[np.ndarray, Batch]] = {}
        for done, shape in enumerate(self._shapes):
            progress(done, len(self._shapes), f"compiling steps of {verify.weights_name(model)}")
            self._runner.compiled(shape)
        self._probe = measure.Probe()

    def run(self, point: Point) -> float:
        """Seconds of one step, from the call to its last output."""
        shape = step_shapes.choose(tuple(self._shapes), point.rows, point.chunks, False)
        if point not in self._arrays:
            self._arrays[point] = steps.arrays(point, self._runner.config, shape=shape)
        return steps.run(self._runner, shape, self._arrays[point])

    def calibrated(self) -> HardwareSpec | None:
        """The machine as a first start of the engine calibrates it now; None: too slow."""
        return first_start.timed(self._runner, self._probe.read)

    def held_bytes(self) -> tuple[int, int]:
        weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._runner.params))
        return weight_bytes, self._runner.cache_bytes

    def close(self) -> None:
        self._runner.free()
        self._probe.close()


def models(model: ModelConfig) -> list[ModelConfig]:
    """The model as it is, and with weights of few bits."""
    if model.formats:
        return [model]
    few = (weight_formats.rounded(model, format) for format in _FORMATS)
    return [model, *(dataclasses.replace(model, formats=tuple(formats.items())) for formats in few)]


def check(model: ModelConfig, room: AdapterConfig = NO_SLOTS) -> None:
    """Checks that this machine can run the model's points.

    Raises:
        InputError: JAX computes on another device than the calibrated processor; a layer cannot run
            yet; or weights and cache need more memory than there is.
    """
    if jax.default_backend() != "cpu":
        raise InputError(
            f"--verify calibrates this machine's processor, JAX computes on {jax.default_backend()}"
            ": set JAX_PLATFORMS=cpu"
        )
    decoder.param_infos(model)
    needed, available = sum(verify.predicted_bytes(model, room)), int(measure.this_memory())
    if needed > available:
        raise InputError(
            f"--verify holds {model.name} with full sequences: {needed} bytes, this machine has "
            f"{available}"
        )


def run(
    model: ModelConfig, room: AdapterConfig, progress: Callable[[int, int, str], None]
) -> list[Verification]:
    """Verifies the planner on a model in several weight formats, and keeps their last calibrations;
    or, with room for adapters, verifies an engine that has some.

    Raises:
        InputError: the model's steps are too slow to calibrate.
    """
    compilation_cache.enable()
    verifications = []
    for variant in models(model):
        with contextlib.closing(EngineRunner(variant, room, progress)) as runner:
            verification = verify.verify(variant, runner, room, progress=progress)
        if verification is None:
            raise InputError(
                f"--verify: the steps of {model.name} are too slow to calibrate; name a smaller one"
            )
        if not room.slots:  # else the constants are those of an engine that is slower
            store.write(verification.hardware[-1], variant)
        verifications.append(verification)
    return verifications
