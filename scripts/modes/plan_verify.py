"""`plan --verify`: the engine's own steps on this machine, beside what they should take."""

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax

from configs import presets
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark import steps
from inference.planner.calibration import calibrate, machine, measure, verify
from inference.planner.calibration.verify import Point, Verification
from inference.runtime import compilation_cache
from inference.runtime.model_runner import Executor
from layers import decoder, params

COMMAND = "python -m scripts.plan --verify"

# A second shape of model: windows, one wide head of keys, norms around each part.
_GEMMA = presets.get("gemma3-270m").config
CUT_GEMMA = dataclasses.replace(_GEMMA, name="gemma3-cut", num_layers=6, vocab_size=32_768)


class EngineRunner:
    """Executors of each model with random weights: a step's time does not depend on their
    values.
    """

    def __init__(self) -> None:
        self._executors: dict[ModelConfig, Executor] = {}
        self._arrays: dict[Point, Any] = {}

    def prepare(self, point: Point) -> None:
        """Makes what the point runs on, and compiles its step."""
        if point.model not in self._executors:
            config = verify.engine_config(point.model)
            values = params.init(decoder.param_infos(point.model))
            self._executors[point.model] = Executor(config, values)
        self._arrays[point] = steps.arrays(point, self._executors[point.model].config)
        self.run(point)

    def run(self, point: Point) -> float:
        """Seconds of one step, from the call to its last output."""
        return steps.run(self._executors[point.model], point.shape, self._arrays[point])

    def held_bytes(self, model: ModelConfig) -> tuple[int, int]:
        """Bytes of weights and of cache, as allocated."""
        executor = self._executors[model]
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(executor.params))
        return held, executor.cache_bytes


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
    room = int(measure.this_memory())
    if needed > room:
        raise InputError(
            f"--verify holds {model.name} in both types: {needed} bytes, this machine has {room}"
        )


def run(model: ModelConfig, progress: Callable[[int, int, str], None]) -> Verification:
    """Verifies the planner with a model and a second one of another kind, and keeps what the
    machine was found to reach.
    """
    compilation_cache.enable()
    chosen, runner = verify.points([model, CUT_GEMMA]), EngineRunner()
    hardware = measure.this_machine()
    best: dict[str, float] = {}
    for done, point in enumerate(chosen):
        progress(done, len(chosen), "compiling steps")
        runner.prepare(point)
        dtype = ("bfloat16", "float32")[done % 2]  # again and again: neighbours only slow it down
        best[dtype] = max(best.get(dtype, 0.0), measure.matmul_rate(dtype))
    hardware = dataclasses.replace(hardware, rates=best)
    found = verify.verify(hardware, chosen, runner, measure.Probe().read, progress=progress)
    calibrate.write(found.hardware)
    return found


def as_json(found: Verification) -> dict[str, Any]:
    """Everything as plain data, and which machine it was."""
    where = {"processor": machine.processor(), "cores": measure.num_cores()}
    return verify.as_json(found) | where | {"jax": importlib.metadata.version("jax")}


def markdown(found: Verification) -> str:
    """The result page."""
    hardware = found.hardware
    median, p90 = (f"{100 * share:.1f} %" for share in found.errors())
    lines = [
        f"# Predicted and measured steps on {measure.num_cores()} cores of {machine.processor()}",
        "",
        f"Written by `{COMMAND} --output=...` on {datetime.date.today()}, jax "
        f"{importlib.metadata.version('jax')}. Weights are random. A time is the median over "
        "rounds in random orders; in each it is the best of three between two readings of the "
        "bandwidth, in units of the lower one. Half of the points calibrate, the errors are of "
        "the other half.",
        "",
        f"* Held-out points: median error **{median}**, 90th percentile **{p90}**.",
    ]
    for name in dict.fromkeys(result.point.model.name for result in found.results):
        shares = [f"{100 * share:.1f} %" for share in found.errors(name)]
        lines.append(f"* Of them {name}: {shares[0]}, {shares[1]}.")
    plain = [f"{100 * share:.1f} %" for share in found.errors(roofline=True)]
    low, high = (f"{each / 1e9:.1f}" for each in found.bandwidths)
    constants = ", ".join(f"{n} {getattr(hardware, n):.4g}" for n in calibrate.CONSTANTS)
    rates = ", ".join(f"{n} {rate / 1e9:.0f} GFLOP/s" for n, rate in hardware.rates.items())
    lines += [
        f"* A plain max(bytes / bandwidth, FLOPs / rate): {plain[0]}, {plain[1]}.",
        f"* Bandwidth {hardware.read_bandwidth / 1e9:.1f} GB/s ({low} to {high} between rounds); "
        f"{rates}.",
        f"* Constants: {constants}.",
        "",
        "| model | type | step | context | measured ms | predicted ms | error | held out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        "| " + " | ".join(map(str, result.point.label)) + f" | {1e3 * result.seconds:.1f} | "
        f"{1e3 * result.predicted_s:.1f} | {100 * result.error:+.0f} % | "
        f"{'yes' if result.is_held_out else ''} |"
        for result in found.results
    ]
    lines += [
        "",
        "| model | type | weights predicted | allocated | cache predicted | allocated |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.model.name} | {each.model.dtype} | {each.predicted[0]} | {each.allocated[0]} | "
        f"{each.predicted[1]} | {each.allocated[1]} |"
        for each in found.memory
    ]
    return "\n".join(lines) + "\n"
