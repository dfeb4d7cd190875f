"""`quantize --method=qat`: a model trained to have few bits, before it is rounded."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs import overrides
from configs.errors import InputError
from configs.recipes import quantize
from configs.recipes.training import Distillation, Recipe
from scripts import common
from scripts.modes import training_steps

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint, Contents
    from inference.checkpoints.load import Progress

_CHECKPOINTS = ".training"  # how the name of the directory beside the output ends


def trained(
    checkpoint: "Checkpoint",
    formats: dict[str, str],
    tokens: np.ndarray,
    record: dict[str, object],
    output: Path,
) -> "tuple[Contents, dict[str, object], Path]":
    """Trains a checkpoint on ids, one text behind the other, for `formats` by path of parameter.
    Returns its tensors, the record with the training, and the folder of its steps.
    """
    from inference.checkpoints import names
    from inference.checkpoints.checkpoint import Contents
    from inference.quantize import straight_through
    from inference.training import distillation, export, start
    from inference.training.step_folder import StepFolder
    from inference.training.windows import Windows
    from layers.params import Params

    model = dataclasses.replace(checkpoint.config, dtype="float32", cache_format=None)
    recipe = overrides.apply(Recipe(model, quantize.TRAINING), common.settings_asked())
    if recipe.model != model or recipe.mesh.num_chips > 1:
        raise InputError("--method=qat reads --set training.FIELD, nothing else of --set or --mesh")
    training = recipe.training
    data = Windows(tokens, training.window, training.batch, training.seed)
    described = dataclasses.asdict(training)
    del described["checkpoint_every"]
    path, record = output.with_name(output.name + _CHECKPOINTS), record | {"training": described}
    folder = StepFolder(path, record)

    def begin(progress: "Progress | None") -> tuple[Params, Params]:
        return (start.masters(recipe, checkpoint, progress), start.masters(recipe, checkpoint))

    student = straight_through.student(model, formats)
    distilling = Distillation(**dataclasses.asdict(training))
    loss = distillation.from_memory(model, model, distilling, student)
    run = training_steps.run(training, loss, begin, data, folder)
    divergence = run.losses
    common.say(
        f"divergence {divergence[0]:.4f} -> {training_steps.last(divergence):.4f} nats a token"
    )
    before = checkpoint.contents()
    source = export.tensors(run.values, checkpoint.config.name)
    return Contents(source, names.identity, before.read_files, before.raw_config), record, path
