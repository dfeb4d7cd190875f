"""`train --task=sft` and `--task=dpo`: a model's weights, or an adapter, on answers of a file."""

import dataclasses
from typing import TYPE_CHECKING

from configs import overrides
from configs.errors import InputError
from configs.recipes import tuning
from configs.recipes.training import Recipe
from scripts import common
from scripts.flags.deployment_flags import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.load import Progress
    from inference.training.answer_lines import Lines
    from inference.training.answers import Answered
    from inference.training.losses import Model
    from inference.training.start import Subject, Vocabulary
    from layers.params import Params

TASKS = tuple(tuning.TRAINING)
_MOST_MEASURED = 256  # pairs


def subject(task: str, checkpoint: "Checkpoint", data: str | None) -> "Subject":
    """All weights of a checkpoint, or an adapter, trained on the answers of a JSONL file; raises
    InputError if there is none, or it cannot be used.
    """
    if data is None:
        raise InputError(f"--task={task} needs --data=FILE.jsonl, whose answers it learns")
    # What is trained is numbers, whatever they are stored in.
    student = dataclasses.replace(checkpoint.config, formats=())
    training = tuning.TRAINING[task]
    training = dataclasses.replace(training, window=min(training.window, student.max_context))
    recipe = overrides.apply(Recipe(student, training), common.settings_asked())
    if recipe.training.fim_rate:
        raise InputError("training.fim_rate is of texts; answers have no gaps: leave it out")
    if WEIGHTS.value is not None and not recipe.training.lora_rank:
        raise InputError(
            f"--weights={WEIGHTS.value}: all weights are trained in float32; give --set "
            "training.lora_rank=16 to train an adapter on them as they are"
        )
    from sharding import mesh as meshes  # brings JAX

    meshes.provide(recipe.mesh, recipe.mesh.num_chips)
    if recipe.training.lora_rank:
        from inference.training import lora

        recipe = lora.with_base(recipe, checkpoint, WEIGHTS.value)
    return (_conversations if task == "sft" else _preferences)(recipe, checkpoint, data)


def _conversations(recipe: Recipe, checkpoint: "Checkpoint", data: str) -> "Subject":
    from inference.training import answer_lines, answer_losses, answers, packing, start

    training, model = recipe.training, recipe.model
    vocabulary = start.vocabulary(checkpoint, (), model.vocab_size)
    lines, sequences = _read(answer_lines.of_answers, data, vocabulary, training.window)
    windows = packing.PackedAnswers(
        sequences, training.window, training.batch, training.seed, packing.can_share_rows(model)
    )
    num_answers = sum(sum(sequence.is_answer) for sequence in sequences)
    return start.Subject(
        recipe, vocabulary, windows,
        f"{len(lines.sequences)} lines, {num_answers} tokens of answers, {windows.count} windows, "
        f"{100 * windows.padding:.0f} % of them padding",
        answers.digest(vocabulary.identity, sequences),
        windows.batch(0)["tokens"].size, checkpoint, answer_losses.answers(model, _model(recipe)),
        lambda progress: _begin(recipe, checkpoint, progress, has_reference=False),
        write=_write(recipe),
    )  # fmt: skip


def _preferences(recipe: Recipe, checkpoint: "Checkpoint", data: str) -> "Subject":
    from inference.training import answer_lines, answer_losses, answers, packing, start

    training, model = recipe.training, recipe.model
    vocabulary = start.vocabulary(checkpoint, (), model.vocab_size)
    lines, sequences = _read(answer_lines.of_preferences, data, vocabulary, training.window)
    pairs = packing.Pairs(lines.sequences, training.window, training.batch, training.seed)
    margins = answer_losses.reward_margins(model, training.dpo_beta, _model(recipe))

    def measure(values: "Params", reference: "Params | None") -> dict[str, float]:
        count = min(pairs.count, _MOST_MEASURED)
        num_rows = training.batch // training.accumulate
        batches = packing.Pairs(lines.sequences, training.window, num_rows, training.seed)
        steps = range(-(-count // num_rows))
        rows = answer_losses.measured(margins, values, reference, map(batches.batch, steps))[:count]
        return {
            "pairs": count,
            "reward_margin": float(rows.mean()),
            "reward_accuracy": float((rows > 0).mean()),
        }

    return start.Subject(
        recipe, vocabulary, pairs, f"{pairs.count} pairs of answers",
        answers.digest(vocabulary.identity, sequences),
        pairs.batch(0)["tokens"].size, checkpoint, answer_losses.preference(margins),
        lambda progress: _begin(recipe, checkpoint, progress, has_reference=True), measure,
        _write(recipe),
    )  # fmt: skip


def _model(recipe: Recipe) -> "Model | None":
    """What is trained: an adapter, or all of a model (None)."""
    from inference.training import lora

    return lora.model(recipe) if recipe.training.lora_rank else None


def _begin(
    recipe: Recipe, checkpoint: "Checkpoint", progress: "Progress | None", has_reference: bool
) -> "tuple[Params, Params | None]":
    """What is trained, and what is not: the model below an adapter, or the reference, which is what
    the decoder makes of the masters at the start.
    """
    from inference.training import lora, losses, start

    if recipe.training.lora_rank:
        return lora.masters(recipe), lora.base(recipe, checkpoint, progress)
    masters = start.masters(recipe, checkpoint, progress)
    if not has_reference:
        return masters, None
    return masters, losses.whole(recipe.model)(start.masters(recipe, checkpoint), None)


def _write(recipe: Recipe) -> "Callable[[Params, Path], None] | None":
    from inference.training import lora

    if not recipe.training.lora_rank:
        return None
    return lambda factors, output: lora.write(factors, recipe, common.model_name(), output)


def _read(
    read: "Callable[..., Lines]", data: str, vocabulary: "Vocabulary", window: int
) -> "tuple[Lines, list[Answered]]":
    """The lines of a file, by a function of `answer_lines`, and all their sequences; says how many
    were cut.
    """
    from inference.training.answers import Encoder

    with common.bars() as progress:
        lines = read(data, Encoder(vocabulary), window, progress)
    sequences = [sequence for line in lines.sequences for sequence in line]
    if lines.num_cut:
        common.say(
            f"cut {lines.num_cut} of {len(sequences)} sequences behind {window} tokens: --set "
            "training.window=N takes longer ones"
        )
    return lines, sequences
