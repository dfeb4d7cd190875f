"""`plan --verify`: the engine's own steps on this machine, beside what was predicted."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from configs import presets
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark import steps
from inference.planner.calibration import measure, store, verify
from inference.planner.calibration.verify import Point, Verification
from inference.runtime import compilation_cache
from inference.runtime.model_runner import ModelRunner
from layers import decoder, params

# A second shape of model: windows, one wide head of keys, norms around each part.
_GEMMA = presets.get("gemma3-270m").config
CUT_GEMMA = dataclasses.replace(_GEMMA, name="gemma3-cut", num_layers=6, vocab_size=32_768)


class EngineRunner:
    """Runners of each model with random weights: a step's time does not depend on their
    values.
    """

    def __init__(self) -> None:
        self._runners: dict[ModelConfig, ModelRunner] = {}
        self._arrays: dict[Point, Any] = {}

    def prepare(self, point: Point) -> None:
        """Allocates what the point runs on, and compiles its step."""
        if point.model not in self._runners:
            config = verify.engine_config(point.model)
            values = params.init(decoder.param_infos(point.model))
            self._runners[point.model] = ModelRunner(config, values)
        self._arrays[point] = steps.arrays(point, self._runners[point.model].config)
        self.run(point)

    def run(self, point: Point) -> float:
        """Seconds of one step, from the call to its last output."""
        return steps.run(self._runners[point.model], point.shape, self._arrays[point])

    @property
    def implementations(self) -> str | None:
        """`ModelRunner.implementations` of the steps."""
        return next(iter(self._runners.values())).implementations

    def held_bytes(self, model: ModelConfig) -> tuple[int, int]:
        """Bytes of weights and of cache, as allocated."""
        runner = self._runners[model]
        weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params))
        return weight_bytes, runner.cache_bytes


def check(model: ModelConfig) -> None:
    """Whether this machine can run the model's points.

    Raises:
        InputError: JAX computes on another device than this machine's processor, which is what is
            calibrated; a layer cannot run yet; or weights and caches in both types need more memory
            than there is.
    """
    if jax.default_backend() != "cpu":
        raise InputError(
            f"--verify calibrates this machine's processor, JAX computes on {jax.default_backend()}"
            ": set JAX_PLATFORMS=cpu"
        )
    decoder.param_infos(model)
    models = {point.model for point in verify.points([model, CUT_GEMMA])}
    needed = sum(sum(verify.predicted_bytes(each)) for each in models)
    available = int(measure.this_memory())
    if needed > available:
        raise InputError(
            f"--verify holds {model.name} in both types: {needed} bytes, this machine has "
            f"{available}"
        )


def run(model: ModelConfig, progress: Callable[[int, int, str], None]) -> Verification:
    """Verifies the planner on a model and a second one of another kind, and saves the machine's
    calibration.
    """
    compilation_cache.enable()
    chosen, runner = verify.points([model, CUT_GEMMA]), EngineRunner()
    hardware = measure.this_machine()
    best: dict[str, float] = {}
    for done, point in enumerate(chosen):
        progress(done, len(chosen), "compiling steps")
        runner.prepare(point)
        dtype = ("bfloat16", "float32")[
            done % 2
        ]  # often, and the best counts: neighbours only slow it down
        best[dtype] = max(best.get(dtype, 0.0), measure.matmul_rate(dtype))
    hardware = dataclasses.replace(hardware, rates=best)
    found = verify.verify(hardware, chosen, runner, measure.Probe().read, progress=progress)
    store.write(dataclasses.replace(found.hardware, implementations=runner.implementations))
    return found
