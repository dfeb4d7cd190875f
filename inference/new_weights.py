"""Weights that an engine starts with or goes on with: from a tree, or from files."""

import functools
from collections.abc import Callable
from pathlib import Path

from configs.engine import Config
from configs.errors import InputError, shown
from configs.heads import Heads
from inference.checkpoints import load, names, provenance, resolve, weight_formats
from inference.checkpoints.load import Progress
from inference.checkpoints.native import orbax_step
from inference.checkpoints.opened import Checkpoint
from layers import decoder, params
from layers.kernels.linear import api as linear
from layers.params import Params
from sharding import mesh as meshes


def reader(
    config: Config,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    draft: Checkpoint | None = None,
) -> Callable[[], Params]:
    """What reads a checkpoint's parameters as the engine's products read them.

    Args:
        config: of an engine, where `weight_formats.choose` has said in which formats.
        checkpoint: what is read, likewise.
        progress: as `load.load_params` takes it.
        draft: of the model that drafts.

    Raises:
        InputError: heads were trained for another model.
    """
    if draft is not None and isinstance(config.draft, Heads):
        provenance.check_target(config.draft, checkpoint)
    if draft is not None:
        read, drafting = reader(config, checkpoint, progress), reader(config.for_draft(), draft)
        return lambda: read() | {"draft": drafting()}
    infos, mesh = decoder.param_infos(config.model), meshes.of(config.mesh)
    packs = config.engine.linear == "ffi_cpu" and mesh is None
    return functools.partial(
        checkpoint.load_params, infos, progress, linear.placement(config, mesh),
        linear.abstract(config, infos) if packs else None,
        in_part=mesh is not None and mesh.is_multi_process,
    )  # fmt: skip


def find(
    source: Params | str | Path, config: Config, progress: Progress | None = None
) -> Callable[[], Params]:
    """What makes, or reads, weights for a running engine; their names and shapes are checked.

    Args:
        source: a tree of the engine's parameters on whatever devices, of its dtypes; what
            `--model` takes; or a step that Orbax wrote of such a tree, sharded however.
        config: the engine's.
        progress: as `load.load_params` takes it.

    Raises:
        InputError: they are not this model's.
    """
    if not isinstance(source, str | Path):
        return functools.partial(linear.copy_params, config, source, meshes.of(config.mesh))
    infos = decoder.param_infos(config.model)
    if orbax_step.is_step(Path(source)):
        tensors = orbax_step.open_tensors(Path(source))
        load.check(params.flatten(infos), tensors, names.identity)
        place = linear.placement(config, meshes.of(config.mesh))
        return functools.partial(load.load_params, infos, tensors, names.identity, progress, place)
    resolved = resolve.resolve(str(source))
    found = params.flatten(decoder.param_infos(resolved.config))
    shapes = {path: info.shape for path, info in found.items()}
    own = {path: info.shape for path, info in params.flatten(infos).items()}
    if shapes != own or resolved.config.family != config.model.family:
        raise InputError(f"{shown(str(source))} is another model than {config.model.name}")
    chosen, checkpoint = weight_formats.choose(
        config, resolved.open(progress), config.engine.linear
    )
    if chosen.model.formats != config.model.formats:
        raise InputError(f"{shown(str(source))} has its weights in other formats than the engine")
    return reader(config, checkpoint, progress)
