"""Trains a model: python -m scripts.train --task=lm --text=FILE --output=DIR."""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from configs import overrides
from configs.errors import InputError
from configs.heads import Heads
from configs.recipes import small
from configs.recipes.training import PolicyRecipe, Recipe, TrainingConfig
from inference.checkpoints import new_directory
from inference.files import cache_directory, staging, user_files
from scripts import common
from scripts.flags import output_flag, task_flag, text_flag
from scripts.flags.deployment_flags import WEIGHTS
from scripts.modes import (
    train_answers,
    train_distill,
    train_heads,
    train_policy,
    training_steps,
)

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.resolve import Resolved
    from inference.training.start import Subject

_TASK = task_flag.TASK
_TASKS = (
    *small.RECIPES,
    *train_heads.TASKS,
    *train_answers.TASKS,
    train_distill.TASK,
    train_policy.TASK,
)
_DATA = flags.DEFINE_string(
    "data",
    None,
    "JSONL file. sft: a conversation a line, with or without tools, or a prompt with a completion. "
    "dpo: a prompt or a conversation, with a chosen and a rejected answer. grpo: a prompt or a "
    "conversation, with what training.reward reads.",
)
_EVAL_DATA = flags.DEFINE_string(
    "eval_data",
    None,
    "grpo: JSONL file of prompts whose greedy answers are rewarded before and after training.",
)
_TEACHER = flags.DEFINE_string(
    "teacher", None, "distill: the model whose distributions of the next token --model learns."
)
_OUTPUT, _TEXT = output_flag.OUTPUT, text_flag.TEXT
for _module in (common, output_flag, task_flag, text_flag):
    flags.adopt_module_key_flags(_module)

UNREAD = tuple(
    name for name in common.UNREAD_BY_TRAINERS if name not in (WEIGHTS.name, "speculate")
)
_TUNING = (*train_answers.TASKS, train_policy.TASK)  # tasks that read --data
_CHECKPOINTS = ".training"  # how the name of the directory beside the output ends
_PICTURE = "loss.png"


def main(_: Sequence[str]) -> None:
    common.check_unread("train", UNREAD)
    if _TASK.value not in _TASKS:
        raise InputError(f"--task={_TASK.value}: must be one of {', '.join(_TASKS)}")
    if _TASK.value not in train_answers.TASKS:
        common.check_unread(f"--task={_TASK.value}", [WEIGHTS.name])
    if _TASK.value != train_distill.TASK:
        common.check_unread(f"--task={_TASK.value}", ["teacher"])
    if _TASK.value != train_policy.TASK:
        common.check_unread(f"--task={_TASK.value}", ("speculate", "eval_data"))
    is_tuning = _TASK.value in _TUNING
    if (_TEXT if is_tuning else _DATA).value is not None:
        flag, other = ("text", "data") if is_tuning else ("data", "text")
        raise InputError(f"--task={_TASK.value} does not read --{flag}: give --{other}=FILE")
    resolved = _resolved()
    name = _OUTPUT.value or cache_directory.trained(_name(resolved))
    is_there = not _OUTPUT.value and Path(name).is_dir()
    if not (is_there or _OUTPUT.value):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    output = Path(name) if is_there else new_directory.target(str(name))
    checkpoints = output.with_name(output.name + _CHECKPOINTS)
    checkpoint = None if resolved is None else common.open_checkpoint(resolved)
    if checkpoint is not None and _TASK.value in train_heads.TASKS:
        subject = train_heads.subject(_TASK.value, checkpoint, _TEXT.value)
    elif checkpoint is not None and _TASK.value in train_answers.TASKS:
        subject = train_answers.subject(_TASK.value, checkpoint, _DATA.value)
    elif checkpoint is not None and _TASK.value == train_policy.TASK:
        subject = train_policy.subject(checkpoint, _DATA.value, _EVAL_DATA.value, checkpoints)
    elif checkpoint is not None and _TASK.value == train_distill.TASK:
        subject = train_distill.subject(checkpoint, _TEACHER.value, _TEXT.value)
    else:
        subject = _language_model(resolved, checkpoint)
    from inference.checkpoints import provenance, text_files
    from inference.training import export
    from inference.training.step_folder import StepFolder

    recipe = subject.recipe
    training = recipe.training
    if _TASK.value != "dpo" and training.dpo_beta != TrainingConfig.dpo_beta:
        raise InputError("training.dpo_beta is of --task=dpo: leave it out")
    if not is_tuning and training.lora_rank:
        tasks = " and ".join(_TUNING)
        raise InputError(f"training.lora_rank is of --task={tasks}: leave it out")
    record = _record(subject)
    provenance.stages(subject.vocabulary.files)  # a damaged list is an error before the training
    folder = StepFolder(checkpoints, record)
    if is_there:
        common.say(f"{output} is there already, trained like this on {subject.size}")
        return
    common.say(f"{recipe.model.name}, {subject.size}, {training.steps} steps of {training.batch}")
    run = training_steps.run(training, subject.loss, subject.start, subject.data, folder)
    measured = subject.measure(run.values, run.frozen)
    if subject.write is not None:
        subject.write(run.values, output)
    else:
        vocabulary, values = subject.vocabulary, subject.served(run.values)
        files = dict(vocabulary.files)
        if subject.starts_from is None:  # of another model whose tokenizer this one has
            files.pop(text_files.PROVENANCE, None)
        files = provenance.appended(files, _stage(record))
        with common.bars() as progress:
            export.write(values, recipe.model, vocabulary.eos_ids, files, output, progress)
    _report(subject, new_directory.published(output), folder.path, run, measured)


def _language_model(resolved: "Resolved | None", checkpoint: "Checkpoint | None") -> "Subject":
    recipe = _recipe(resolved)
    from sharding import mesh as meshes  # brings JAX

    meshes.provide(recipe.mesh, recipe.mesh.num_chips)
    from inference.training import gap_windows, losses, start, texts, token_file

    documents = texts.of_file(_TEXT.value) if _TEXT.value else texts.standard_library()
    fills_gaps = recipe.training.fim_rate > 0
    vocabulary = start.vocabulary(checkpoint, documents, recipe.model.vocab_size, fills_gaps)
    with common.bars() as progress:
        tokens, digest = token_file.of_texts(documents, vocabulary, progress)
    if _TASK.value == "draft":
        checkpoint = None
    training = recipe.training
    data, size = gap_windows.of_text(tokens, training, vocabulary.tokenizer)
    return start.Subject(
        recipe, vocabulary, data, size, digest, training.batch * training.window, checkpoint,
        losses.next_token(recipe.model),
        lambda progress: (start.masters(recipe, checkpoint, progress), None),
    )  # fmt: skip


def _report(
    subject: "Subject",
    output: str,
    folder: Path,
    run: training_steps.Trained,
    measured: dict[str, float],
) -> None:
    """Prints what came of it, and draws the losses where matplotlib is installed."""
    recipe, per_step, losses = subject.recipe, subject.step_tokens, run.losses
    unit = "" if isinstance(recipe.model, Heads) or subject.draw else " nats a token"
    if _TASK.value == "dpo":
        unit = " nats a pair"
    picture = folder / _PICTURE
    if importlib.util.find_spec("matplotlib") is None:
        common.say("no picture of the losses: pip install '.[plots]'")
    else:
        from scripts.reports.plots import loss_plot

        title = f"{recipe.model.name}, {len(losses)} steps"
        if subject.draw is None:
            title += f" of {per_step} tokens"
            image = loss_plot.curve(losses, per_step, title, unit.strip())
        else:
            image = subject.draw(title)
        user_files.write({picture: image})
        common.say(f"wrote {staging.name(picture)}")
    result = {
        "output": output,
        "checkpoints": staging.name(folder),
        "steps": len(losses),
        **({"tokens": len(losses) * per_step} if per_step else {}),
        "first_loss": float(losses[0]),
        "loss": training_steps.last(losses),
        "step_s": run.step_s,
        **measured,
    }
    if common.JSON.value:
        common.print_json(result, recipe)
        return
    tokens = f", {result['tokens']} tokens" if per_step else ""
    rate = f", {per_step / run.step_s:.0f} tokens/s" if run.step_s and per_step else ""
    figures = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in measured.items())
    print(
        f"{output}: loss {result['first_loss']:.4f} -> {result['loss']:.4f}{unit} in "
        f"{len(losses)} steps{tokens}{rate}{figures}"
    )


def _resolved() -> "Resolved | None":
    """The `resolve.Resolved` model that --model names; for a draft else the recipe's own."""
    from inference.checkpoints import resolve

    if flags.FLAGS["model"].present:
        return resolve.resolve(common.model_name())
    if _TASK.value in _TUNING:
        raise InputError(f"--task={_TASK.value} needs --model, whose answers it trains")
    if _TASK.value == train_distill.TASK:
        raise InputError("--task=distill needs --model, which learns from --teacher")
    if _TASK.value in small.RECIPES and _TASK.value != "draft":
        return None
    target = cache_directory.trained(small.RECIPES["lm"].model.name)
    if not target.is_dir():
        raise InputError(f"--task={_TASK.value} needs --model=TARGET, for which it trains")
    return resolve.resolve(str(target))


def _name(resolved: "Resolved | None") -> str:
    if resolved is not None and _TASK.value not in small.RECIPES:
        return f"{resolved.config.name}-{_TASK.value}"
    return str(_recipe(resolved).model.name)


def _recipe(resolved: "Resolved | None") -> Recipe:
    """The task's recipe, with the model or the vocabulary of --model, and --set and --mesh."""
    recipe = small.RECIPES[_TASK.value]
    if resolved is not None:
        # What is trained is numbers, whatever they are stored in.
        student = dataclasses.replace(resolved.config, formats=())
        drafts = dataclasses.replace(
            recipe.model, name=f"{student.name}-draft", vocab_size=student.vocab_size
        )
        recipe = dataclasses.replace(recipe, model=drafts if _TASK.value == "draft" else student)
    return overrides.apply(recipe, common.settings_asked())


def _record(subject: "Subject") -> dict[str, object]:
    """What another run has to be to go on from this one's checkpoints."""
    from inference.checkpoints import provenance
    from inference.checkpoints.native import config_file

    training = dataclasses.asdict(subject.recipe.training)
    del training["checkpoint_every"]
    if not training["fim_rate"]:  # as before there were gaps: such runs go on
        del training["fim_rate"]
    if _TASK.value != "dpo":
        del training["dpo_beta"]
    if not training["lora_rank"]:
        del training["lora_rank"], training["lora_alpha"], training["lora_modules"]
    start = None if subject.starts_from is None else provenance.weights_digest(subject.starts_from)
    sampling = {}
    if isinstance(subject.recipe, PolicyRecipe):
        engine = subject.recipe.engine
        kernels = dataclasses.asdict(engine.kernels)
        sampling = {"weights": engine.weights, "deterministic": engine.deterministic, **kernels}
        if engine.cache.page_tokens is not None:  # some kernels add up a page at a time
            sampling["page_tokens"] = engine.cache.page_tokens
        sampling = {"engine": sampling}
    return {
        "task": _TASK.value,
        **({} if subject.teacher is None else {"teacher": subject.teacher}),
        **sampling,
        "model": config_file.to_json(subject.recipe.model),
        "training": training,
        "text": subject.text,
        "start": start,
    }


def _stage(record: dict[str, object]) -> dict[str, object]:
    """What a checkpoint says of the training that made it."""
    stage = {"made_by": "train", "parent": record["start"], "data": record["text"]}
    return stage | {
        name: record[name] for name in ("task", "teacher", "training") if name in record
    }


if __name__ == "__main__":
    common.run(main, UNREAD)
