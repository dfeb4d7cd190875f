"""`train --task=grpo`: a model's own weights, by the rewards of answers that an engine samples."""

import dataclasses
import functools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError, reason
from configs.recipes import tuning
from configs.recipes.training import PolicyRecipe
from scripts import common
from scripts.flags import speculation_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.load import Progress
    from inference.engine import Engine
    from inference.training.answer_lines import Prompt
    from inference.training.grpo import Iteration
    from inference.training.losses import Model
    from inference.training.rewards import FunctionReward
    from inference.training.start import Subject
    from layers.params import Params

TASK = "grpo"
_ANSWERS, _ITERATIONS = "answers", "iterations.jsonl"  # beside the checkpoints
_FIGURES = {"iteration", "reward", "dropped", "tokens", "max_gap"}  # of a line, that are read here
_LAST_PART = 20  # the reward that is reported is the mean of the last 1/20 of the iterations


def subject(
    checkpoint: "Checkpoint", data: str | None, eval_data: str | None, folder: Path
) -> "Subject":
    """All weights of a checkpoint, or an adapter, trained on answers to the prompts of a JSONL
    file; `folder` is that of the checkpoints. Raises InputError if a file or a setting cannot be
    used.
    """
    if data is None:
        raise InputError(f"--task={TASK} needs --data=FILE.jsonl, whose prompts it answers")
    # What is trained is numbers, whatever they are stored in.
    student = dataclasses.replace(checkpoint.config, formats=())
    training = tuning.POLICY
    window = min(training.window, student.max_context)
    training = dataclasses.replace(
        training, window=window, max_new_tokens=min(training.max_new_tokens, window)
    )
    recipe = PolicyRecipe(student, training, engine=tuning.SAMPLING)
    recipe = overrides.apply(recipe, common.settings_asked())
    training, model = recipe.training, recipe.model
    if training.fim_rate:
        raise InputError("training.fim_rate is of texts; answers have no gaps: leave it out")
    if not training.reward:
        raise InputError(
            "training.reward is missing: --set training.reward=exact, regex, json_schema or "
            "module:function"
        )
    from inference.training import answer_lines, answers, policy_loss, rewards, start

    reward = rewards.of_name(training.reward)
    vocabulary = start.vocabulary(checkpoint, (), model.vocab_size)
    read = functools.partial(
        answer_lines.of_prompts, encoder=answers.Encoder(vocabulary),
        most_tokens=training.window - training.max_new_tokens,
        check=functools.partial(rewards.check_line, training.reward),
    )  # fmt: skip
    prompts, held_out = read(data), read(eval_data) if eval_data else []
    longest = max(len(prompt.tokens) for prompt in (*prompts, *held_out))
    run = _Run(recipe, checkpoint, prompts, held_out, longest + training.max_new_tokens, folder)
    return start.Subject(
        recipe, vocabulary, run, f"{len(prompts)} prompts",
        _digest(vocabulary.identity, prompts, held_out), 0, checkpoint,
        policy_loss.clipped(model, training, run.trained), functools.partial(run.begin, reward),
        run.measure, run.write, run.draw,
    )  # fmt: skip


def on_this_device(settings: EngineConfig) -> EngineConfig:
    """Settings that are deterministic only where this device can be."""
    from layers.backends import backends
    from layers.kernels.device import target_device

    if backends.of(target_device()).is_deterministic:
        return settings
    return dataclasses.replace(settings, deterministic=False)


def _digest(identity: bytes, *files: "list[Prompt]") -> str:
    import hashlib

    whole = hashlib.sha256(hashlib.sha256(identity).digest())
    for prompts in files:
        whole.update(json.dumps(prompts).encode())
    return whole.hexdigest()


class _Run:
    """`loop.PolicyData`, and all that begins when checkpoints may be read."""

    def __init__(
        self,
        recipe: PolicyRecipe,
        checkpoint: "Checkpoint",
        prompts: "list[Prompt]",
        held_out: "list[Prompt]",
        most_tokens: int,
        folder: Path,
    ):
        """`most_tokens`: of a prompt with its answer."""
        from inference.training import lora

        self._recipe, self._checkpoint = recipe, checkpoint
        self._prompts, self._held_out, self._most_tokens = prompts, held_out, most_tokens
        self._folder = folder
        self._log: list[dict[str, float]] = []  # an `Iteration` each
        self._reward_before: float | None = None
        rank = recipe.training.lora_rank
        self.trained: Model | None = lora.model(recipe) if rank else None
        self.write = functools.partial(_write_adapter, recipe) if rank else None

    def begin(
        self, reward: "FunctionReward", progress: "Progress | None"
    ) -> "tuple[Params, Params | None]":
        """Parameters, and the model below an adapter; with an engine that samples answers."""
        from inference.training import grpo, lora, losses, packing, start
        from inference.training.engine_logprobs import EngineLogprobs

        recipe, training = self._recipe, self._recipe.training
        has_reference = training.kl_coefficient > 0
        served = lora.merged(recipe) if training.lora_rank else losses.whole(recipe.model)
        frozen = None
        if training.lora_rank:
            masters, frozen = lora.masters(recipe), lora.base(recipe, self._checkpoint, progress)
            reference = frozen if has_reference else None
        else:
            masters = start.masters(recipe, self._checkpoint, progress)
            first = start.masters(recipe, self._checkpoint) if has_reference else None
            reference = None if first is None else losses.whole(recipe.model)(first, None)
        self._log = self._read_log()
        engine, config = self._engine()
        logprobs = EngineLogprobs(config, self._most_tokens)
        self._answers = grpo.PolicyAnswers(
            self._prompts, reward, training, engine, logprobs, served, reference,
            self._folder / _ANSWERS, packing.can_share_rows(recipe.model), self._note,
        )  # fmt: skip
        if self._held_out:
            self._reward_before = self._answers.evaluate(self._held_out)
            common.say(f"held-out reward {self._reward_before:.3f}")
        return masters, frozen

    def _engine(self) -> "tuple[Engine, Config]":
        """The engine that samples, and a configuration with its kernels, in which log-probabilities
        of the weights as they are trained are computed.
        """
        recipe, settings = self._recipe, on_this_device(self._recipe.engine)
        if settings.max_context is None:
            most = min(self._most_tokens, recipe.model.max_context)
            settings = dataclasses.replace(settings, max_context=most)
        config = Config(recipe.model, settings)
        engine = common.load_engine(
            self._checkpoint, speculation_flags.apply(config, common.model_name())
        )
        settings = dataclasses.replace(settings, weights=None)
        return engine, dataclasses.replace(config, engine=settings)

    def sampled(self, step: int, params: "Params", frozen: object) -> "Mapping[str, np.ndarray]":
        """As `loop.PolicyData`."""
        return self._answers.sampled(step, params, frozen)

    def _note(self, iteration: "Iteration") -> None:
        """Says what an iteration came to, and writes it beside those before it."""
        from inference.files import atomic

        path = self._folder / _ITERATIONS
        self._log = [line for line in self._log if line["iteration"] < iteration.iteration]
        self._log.append(iteration._asdict())
        try:
            with atomic.open_file(path) as file:
                file.write("".join(f"{json.dumps(line)}\n" for line in self._log).encode())
        except OSError as error:
            raise InputError(f"cannot write {path}: {reason(error)}") from None
        figures = [
            f"reward {iteration.reward:.3f}",
            f"{iteration.answer_tokens:.1f} tokens an answer",
        ]
        if iteration.dropped:
            figures.append(f"{100 * iteration.dropped:.1f} % without a reward")
        if iteration.divergence is not None:
            figures.append(f"divergence {iteration.divergence:.4f} nats")
        figures.append(f"largest gap {iteration.max_gap:.2g}")
        figures.append(f"{iteration.rollout_s:.1f} s sampling, {iteration.update_s:.1f} s training")
        common.say(f"iteration {iteration.iteration}: {', '.join(figures)}")

    def _read_log(self) -> list[dict[str, float]]:
        """The iterations of a run that goes on."""
        path = self._folder / _ITERATIONS
        if not path.exists():
            return []
        try:
            lines = list(map(json.loads, path.read_text("utf-8").splitlines()))
            if all(line.keys() >= _FIGURES for line in lines):
                return lines
            why = "a line lacks figures"
        except (OSError, ValueError, AttributeError) as error:
            why = reason(error)
        raise InputError(f"{path} cannot be read: {why}; remove it to go on without its figures")

    def measure(self, values: "Params", frozen: "Params | None") -> dict[str, float]:
        """Figures of the whole run, and the held-out reward before and after it."""
        self._answers.close()
        if not self._log:  # all steps were done, and the file was removed
            return {}
        count = max(len(self._log) // _LAST_PART, 1)
        rewards = [line["reward"] for line in self._log]
        figures = {
            "first_reward": statistics.fmean(rewards[:count]),
            "reward": statistics.fmean(rewards[-count:]),
            "dropped": statistics.fmean(line["dropped"] for line in self._log),
            "answer_tokens": sum(line["tokens"] for line in self._log),
            "max_gap": max(line["max_gap"] for line in self._log),
        }
        if self._reward_before is not None:
            figures["held_out_reward_before"] = self._reward_before
            figures["held_out_reward"] = self._answers.evaluate(self._held_out, (values, frozen))
        return figures

    def draw(self, title: str) -> bytes:
        from scripts.reports.plots import policy_plot

        return policy_plot.curves(self._log, title)


def _write_adapter(recipe: PolicyRecipe, factors: "Params", output: Path) -> None:
    from inference.training import lora

    lora.write(factors, recipe, common.model_name(), output)
