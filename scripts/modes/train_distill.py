"""`train --task=distill`: a model learns the distributions of another, its teacher."""

import dataclasses
import functools
from typing import TYPE_CHECKING

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.recipes import distill
from configs.recipes.training import DistillationRecipe, Recipe
from scripts import common
from scripts.modes import train_heads, train_policy

if TYPE_CHECKING:
    import numpy as np

    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.load import Progress
    from inference.engine import Engine
    from inference.training.start import Subject, Vocabulary
    from layers.params import Params

TASK = "distill"


def subject(checkpoint: "Checkpoint", teacher_name: str | None, text: str | None) -> "Subject":
    """All weights of a checkpoint, trained on a teacher's distributions over a file, or (`text` is
    None) over what the teacher writes by itself. Raises InputError if there is no teacher, or one
    with other tokens.
    """
    if teacher_name is None:
        raise InputError(f"--task={TASK} needs --teacher, whose distributions --model learns")
    from inference.checkpoints import resolve

    teacher = common.open_checkpoint(resolve.resolve(teacher_name))
    # What is trained is numbers, whatever they are stored in.
    student = dataclasses.replace(checkpoint.config, formats=())
    training = dataclasses.replace(
        distill.TRAINING, window=min(distill.TRAINING.window, student.max_context)
    )
    recipe = overrides.apply(DistillationRecipe(student, training), common.settings_asked())
    training, student = recipe.training, recipe.model
    if training.fim_rate or training.lora_rank:
        field = "fim_rate" if training.fim_rate else "lora_rank"
        raise InputError(
            f"training.{field}={getattr(training, field)}: is not of --task={TASK}; leave it out"
        )
    target = dataclasses.replace(teacher.config, formats=())
    if training.window > target.max_context:
        raise InputError(
            f"training.window={training.window}: must be at most the context of the teacher, "
            f"{target.max_context}"
        )
    import jax

    from sharding import mesh as meshes

    meshes.provide(recipe.mesh, recipe.mesh.num_chips)
    from inference.checkpoints import provenance
    from inference.checkpoints.native import config_file
    from inference.training import distillation, losses, start
    from inference.training.student_windows import StudentWindows
    from inference.training.teacher_file import TeacherFile
    from inference.training.windows import Windows

    vocabulary = start.vocabulary(checkpoint, (), student.vocab_size)
    vocabulary.tokenizer.check_same(teacher.load_tokenizer(), "the teacher")
    if student.vocab_size != target.vocab_size:
        raise InputError(
            f"--teacher={teacher_name}: has {target.vocab_size} tokens, and --model "
            f"{student.vocab_size}; a student has its teacher's"
        )
    digest = provenance.weights_digest(teacher)
    tokens, name = _tokens(teacher, vocabulary, digest, text, training.window)
    windows = Windows(tokens, training.window, training.batch, training.seed)
    of_teacher = Recipe(target, training, recipe.mesh)
    file = None
    if training.top_k >= student.vocab_size:
        raise InputError(
            f"training.top_k={training.top_k}: must be below the {student.vocab_size} tokens of "
            "the model; leave it out to learn from all of them"
        )
    if training.top_k:
        described = {"teacher": digest, "model": config_file.to_json(target), "tokens": name}
        file = TeacherFile(windows, training, described)

    def load(progress: "Progress | None" = None) -> "Params":
        """The teacher's parameters as they are declared."""
        values = start.masters(of_teacher, teacher, progress)
        return jax.jit(losses.whole(target))(values, None)

    def begin(progress: "Progress | None") -> "tuple[Params, Params | None]":
        frozen = None if file else load(progress)
        if file:
            file.write(target, load, progress)
        masters = start.masters(recipe, checkpoint, progress)
        return distillation.masters(masters, student, target, training), frozen

    data: TeacherFile | Windows | StudentWindows = file or windows
    if training.on_policy:
        data = StudentWindows(
            windows, training, student, functools.partial(_engine, recipe, checkpoint)
        )
    loss = (
        distillation.from_file(student, training)
        if file
        else distillation.from_memory(target, student, training)
    )
    return start.Subject(
        recipe, vocabulary, data,
        f"{len(tokens)} tokens of text, {windows.count} windows", name,
        training.batch * training.window, checkpoint, loss, begin,
        teacher=digest, served=functools.partial(distillation.student_of, training=training),
    )  # fmt: skip


def _engine(recipe: DistillationRecipe, checkpoint: "Checkpoint") -> "Engine":
    """What the student writes with."""
    training = recipe.training
    settings = EngineConfig.of(
        max_seqs=training.batch, max_context=training.window + 1, decode_rows=(training.batch,),
        deterministic=True,
    )  # fmt: skip
    config = Config(recipe.model, train_policy.on_this_device(settings))
    return common.load_engine(checkpoint, config)


def _tokens(
    teacher: "Checkpoint", vocabulary: "Vocabulary", digest: str, text: str | None, window: int
) -> "tuple[np.ndarray, str]":
    """Ids that both models read, and a digest that names them; `digest` is of the teacher's
    weights.
    """
    from inference.training import own_samples, texts, token_file

    if text is not None:
        with common.bars() as progress:
            return token_file.of_texts(texts.of_file(text), vocabulary, progress)
    first = own_samples.opening(vocabulary.tokenizer)
    if window <= len(first):
        raise InputError(
            f"training.window={window}: must be above the {len(first)} tokens that open a sample; "
            "give more, or --text"
        )
    return train_heads.own_tokens(teacher, digest, first, distill.SAMPLES, window)
