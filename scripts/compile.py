"""Compiles steps for chips that are not there: python -m scripts.compile --target=v6e:1x1.

What the compiled programs take of each chip and ask of it, beside what the planner says.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from configs.hardware import targets
from configs.hardware.targets import Target
from configs.mesh import Mesh
from configs.prefill import TOGETHER
from configs.recipes import run
from configs.settings.cache import CacheConfig
from inference.files import object_store, staging
from scripts import common
from scripts.flags import deployment_flags, placement_flags, shared_flags
from scripts.reports import compile_text

_TARGET = flags.DEFINE_string(
    "target", None, f"Chips to compile for: {targets.FORMS}; default: those of --config."
)
_ALL = flags.DEFINE_bool("all", False, "Every step of the engine, not the largest alone.")
_SERIALIZE = flags.DEFINE_string(
    "serialize",
    None,
    "Directory or URL to write every step's executable to, for engines with --executables.",
)
_MESH, _BATCH = deployment_flags.MESH, placement_flags.BATCH
_CONTEXT = placement_flags.CONTEXT
for _module in (common, deployment_flags, placement_flags):  # --help shows theirs too
    flags.adopt_module_key_flags(_module)

_FLAGS = ("target", "all", "mesh", "batch", "context", "model", "config", "set", "cache", "json",
          "serialize")  # fmt: skip
_SEQUENCES, _TOKENS = 16, 4096  # of an engine that nobody gave sizes


def main(_: Sequence[str]) -> None:
    common.check_flags("compile", {"compile": _FLAGS})
    run_file = common.named_run()
    target_name = _TARGET.value or (run_file.target if run_file else None)
    if target_name is None:
        raise InputError(f"--target names what to compile for: {targets.FORMS}")
    target = targets.parse(target_name)
    config = _config(target)
    from sharding import topologies

    topologies.prepare(target)
    topologies.devices(target)
    folder = _directory(_SERIALIZE.value) if _SERIALIZE.value else None

    from inference.planner.compiled import prediction
    from inference.planner.compiled.report import AbsentEngine, RefusedStep
    from inference.runtime import compilation_cache
    from inference.scheduling import step_shapes

    engine = AbsentEngine(config, target)
    if _SERIALIZE.value and engine.several_hosts:
        raise InputError(
            f"--target={target.name} is several hosts, which load no executables: leave --serialize"
            " out"
        )
    shapes = engine.usual_shapes()
    if _ALL.value or _SERIALIZE.value:
        shapes = step_shapes.enumerate_shapes(engine.config.engine)
    predicted = prediction.predict(engine.config, target, shapes)
    exchanges = [
        prediction.exchanged(engine.config, target, shape, engine.several_hosts) for shape in shapes
    ]
    if not common.JSON.value:
        compile_text.show_prediction(
            engine.config, engine.attention, target, config.mesh, predicted
        )
    steps_done, written = [], []
    with compilation_cache.disabled() if _SERIALIZE.value else contextlib.nullcontext():
        for step, exchange in zip(engine.steps(shapes), exchanges, strict=True):
            steps_done.append(step)
            if not common.JSON.value:
                compile_text.show_step(step, exchange)
        if folder is not None:
            refused = {step.shape for step in steps_done if isinstance(step, RefusedStep)}
            written_shapes = [shape for shape in shapes if shape not in refused]
            written = engine.write(written_shapes, folder)
    size = sum(path.stat().st_size for path in written)
    names = [staging.published(path) for path in written]
    if common.JSON.value:
        result: dict[str, object] = {"target": target.name, "mesh": dataclasses.asdict(config.mesh)}
        result |= {"attention": engine.attention}
        result |= compile_text.as_json(steps_done, predicted, exchanges)
        result |= {"executables": names} if names else {}
        common.print_json(result, engine.config)
    else:
        compile_text.show_verdict(steps_done, predicted)
        if names:
            compile_text.show_written(names, size, engine.config, target)


def _directory(name: str) -> Path:
    """The directory of --serialize, made before minutes of compiling; for a URL one whose files the
    store gets.
    """
    is_url = object_store.is_url(name)
    if is_url:
        object_store.listed(name)  # says now what would fail then
    path = staging.writable_place(name) if is_url else Path(name)
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write --serialize={path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"cannot write --serialize={path}: permission denied")
    if path.stat().st_mode & 0o022:
        raise InputError(
            f"--serialize={path}: others may write there, so that nothing would load it; chmod go-w"
        )
    return path


def _mesh(run_mesh: Mesh, target: Target) -> Mesh:
    """What --mesh, --set or the run of --config says; else all devices along `model`."""
    from sharding.mesh import provide

    is_named = _MESH.value or run_mesh.num_chips > 1
    mesh = run_mesh if is_named else Mesh(model=target.num_devices)
    if target.is_here:
        provide(mesh, mesh.num_chips)
    else:
        target.check_mesh(mesh)
    return mesh


def _config(target: Target) -> Config:
    """The model of --model or --config, with the engine of --batch and --context: pages for all
    sequences at their longest, unless a run or --set says how many.
    """
    sizes: dict[str, object] = {}
    if _BATCH.present:
        sizes["max_seqs"] = shared_flags.whole_number(_BATCH)
    if _CONTEXT.present:
        sizes["max_context"] = shared_flags.whole_number(_CONTEXT)
    _, config = common.named_config({"max_seqs": _SEQUENCES} | sizes, sizes)
    mesh = _mesh(config.mesh, target)
    config = dataclasses.replace(config, mesh=mesh, prefill=TOGETHER)  # others run the same program
    run_file = common.named_run()
    config = run.stored(config, run_file.published if run_file else None)
    config = config.for_platform(target.platform, target.pads_bytes)
    if flags.FLAGS["config"].present:
        return config
    if config.engine.max_context is None:
        config = config.with_engine(max_context=min(_TOKENS, config.model.max_context))
    if config.engine.cache.cache_bytes == CacheConfig.cache_bytes:
        config = config.with_room(config.engine.max_seqs)
    return config


if __name__ == "__main__":
    common.run(main)
