"""What group-relative policy optimization learns from (GRPO, Shao et al. 2024, arXiv 2402.03300):
answers that an engine samples, compared within groups by their rewards.

An iteration learns from the answers that the weights of `staleness` iterations before have sampled
(those at the start, for the first ones). They are sampled in a thread while iterations between
train, by copies of the weights, and lie in files beside the checkpoints. So a run that goes on from
a checkpoint learns from the same answers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from configs.errors import InputError
from configs.recipes.training import PolicyTraining
from inference.new_weights import NewWeights
from inference.outputs import Completion
from inference.request import SamplingParams
from inference.scheduling.sequence import FinishReason
from inference.training import packing, policy_loss, rewards, rollouts
from inference.training.answer_lines import Prompt
from inference.training.answers import Answered
from inference.training.losses import Model
from inference.training.rewards import Reward
from inference.training.rollouts import Answer, Rollouts
from inference.training.windows import Order
from layers.params import Params

_NUM_KEPT = 2  # checkpoints, each with the answers from which training goes on


class Policy(Protocol):
    """What is used of an `Engine`."""

    @property
    def weight_version(self) -> int: ...

    def generate(
        self, prompts: Sequence[list[int]], params: list[SamplingParams]
    ) -> list[Completion]: ...

    def update_params(
        self, source: Params | str | Path | NewWeights, *, version: int | None = None
    ) -> int: ...


class Logprobs(Protocol):
    """What is used of `EngineLogprobs`."""

    def pack(self, params: Params) -> Params: ...

    def __call__(self, weights: Params, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...


class Iteration(NamedTuple):
    """Figures of an iteration; rewards are means over answers that have one.

    Attributes:
        dropped: share of answers that have no reward.
        answer_tokens: of an answer, the mean.
        tokens: of all answers.
        divergence: from the reference, in nats a token; None without one.
        max_gap, mean_gap: of the log-probabilities of the engine and of the trainer.
        rollout_s: of sampling.
        update_s: of the iteration but for waiting for answers.
    """

    iteration: int
    reward: float
    dropped: float
    answer_tokens: float
    tokens: int
    divergence: float | None
    max_gap: float
    mean_gap: float
    rollout_s: float
    update_s: float


class PolicyAnswers:
    """`loop.PolicyData`: batches of answers that `engine` samples; it is updated in place."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        reward: Reward,
        training: PolicyTraining,
        engine: Policy,
        logprobs: Logprobs,
        model: Model,
        reference: Params | None,
        folder: Path,
        shares_rows: bool,
        report: Callable[[Iteration], None] = lambda iteration: None,
    ):
        """Copies the reference; nothing is sampled yet.

        Args:
            model: makes parameters as they are declared of what is trained.
            reference: parameters likewise; None: there is none.
            folder: of the files of answers.
            shares_rows: as `packing.can_share_rows`.
            report: is called with each iteration's figures when the next one begins.
        """
        self._prompts, self._reward, self._training = prompts, reward, training
        self._engine, self._logprobs = engine, logprobs
        self._reference = None if reference is None else logprobs.pack(reference)
        self._declared = jax.jit(model)
        self._folder, self._shares_rows, self._report = folder, shares_rows, report
        self._order = Order(len(prompts), training.batch, training.seed)
        self._pool = ThreadPoolExecutor(1, "rollouts")
        self._pending: dict[int, Future[None]] = {}
        self._current: _Current | None = None

    def sampled(self, step: int, params: Params, frozen: object) -> Mapping[str, np.ndarray]:
        """The batch of `policy_loss.clipped` for a step; raises InputError if no answer of the
        iteration has a reward, or its file cannot be read or written.
        """
        self._join()
        iteration, part = divmod(step, self._training.updates)
        values = self._declared(params, frozen)
        weights = self._logprobs.pack(values)
        if self._current is None or self._current.iteration != iteration:
            self._begin(iteration, part, values, weights)
        return self._batch(part, weights)

    def close(self) -> None:
        """Waits for answers that are being sampled, and reports the last iteration."""
        self._join()
        self._pool.shutdown()
        self._end()

    def evaluate(
        self, prompts: Sequence[Prompt], trained: tuple[Params, object] | None = None
    ) -> float:
        """The mean reward of the engine's greedy answers, of those that have one. `trained`: what
        is trained, and what stays, which the engine goes on with. Raises InputError if none has.
        """
        if trained is not None:
            self._engine.update_params(self._declared(*trained))
        params = SamplingParams(max_new_tokens=self._training.max_new_tokens)
        completions = self._engine.generate(
            [prompt.tokens for prompt in prompts], [params] * len(prompts)
        )
        texts = [completion.text for completion in completions]
        return float(np.nanmean(self._rewarded(prompts, texts)))

    def _begin(self, iteration: int, part: int, values: Params, weights: Params) -> None:
        """Samples by the weights at the start of an iteration what these are to sample, and takes
        up the answers that the iteration learns from.
        """
        self._end()
        if iteration == part == 0:
            self._forget(self._training.iterations)  # of a run without a checkpoint
        staleness, start = self._training.staleness, time.perf_counter()
        first = iteration + staleness if iteration else 0
        numbers = range(first, min(iteration + staleness, self._training.iterations - 1) + 1)
        missing = [number for number in numbers if not self._path(number).exists()]
        if missing and part:
            self._raise_lost(missing[0])
        if missing:
            self._engine.update_params(values, version=iteration + 1)  # 0: the checkpoint's
        for number in missing:
            self._pending[number] = self._pool.submit(self._sample, number, weights)
        if iteration in self._pending:
            self._pending.pop(iteration).result()
            start = time.perf_counter()
        batch = self._read(iteration)
        sequences = self._sequences(batch.answers)
        if any(answer.policy is None for answer in batch.answers):
            of_answers = self._of_answers(batch.answers, self._logprobs(weights, sequences))
            for answer, logprobs in zip(batch.answers, of_answers, strict=True):
                answer.policy = logprobs
            batch.write(self._path(iteration))
        references: list[np.ndarray] = []
        if self._reference is not None:
            references = self._of_answers(batch.answers, self._logprobs(self._reference, sequences))
        self._current = _Current(iteration, batch, references, start)
        step = iteration * self._training.updates - _NUM_KEPT * self._training.checkpoint_every
        self._forget(step // self._training.updates)

    def _sample(self, iteration: int, weights: Params) -> None:
        """Samples an iteration's answers by the engine's weights, which the trainer has in
        `weights`, and writes them with their rewards.
        """
        training, start = self._training, time.perf_counter()
        numbers = self._order.batch(iteration)
        seeds = np.random.SeedSequence((training.seed, iteration)).generate_state(
            len(numbers), np.uint64
        )
        completions = self._engine.generate(
            [self._prompts[number].tokens for number in numbers],
            [
                SamplingParams(
                    max_new_tokens=training.max_new_tokens, temperature=1.0, seed=int(seed),
                    n=training.group_size,
                )
                for seed in seeds
            ],
        )  # fmt: skip
        groups = [(completion, *completion.others) for completion in completions]
        if any(one.finish_reason == FinishReason.ERROR for group in groups for one in group):
            raise InputError(
                f"training.learning_rate={training.learning_rate}: the weights that sample the "
                f"answers of iteration {iteration} give no finite log-probabilities; lower it"
            )
        answers = [
            Answer(
                number, completion.token_ids, completion.text, None,
                np.asarray(completion.logprobs, np.float32), None,
            )
            for number, group in zip(numbers, groups, strict=True) for completion in group
        ]  # fmt: skip
        prompts = [self._prompts[answer.prompt] for answer in answers]
        rewards_B = self._rewarded(prompts, [answer.text for answer in answers])
        for answer, reward in zip(answers, rewards_B, strict=True):
            answer.reward = float(reward) if np.isfinite(reward) else None
        seconds = time.perf_counter() - start
        trained = self._of_answers(answers, self._logprobs(weights, self._sequences(answers)))
        gaps = [
            np.abs(logprobs - answer.logprobs)
            for answer, logprobs in zip(answers, trained, strict=True)
        ]
        if self._training.staleness == 0:
            for answer, logprobs in zip(answers, trained, strict=True):
                answer.policy = logprobs
        gap = np.concatenate(gaps)
        version = self._engine.weight_version
        sampled = Rollouts(
            iteration, version, seconds, float(gap.max()), float(gap.mean()), answers
        )
        sampled.write(self._path(iteration))

    def _rewarded(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        """Rewards of answers, f64[B], NaN where there is none; raises InputError if there is no
        other.
        """
        fields = [prompt.fields for prompt in prompts]
        scores = rewards.of_batch(self._reward, fields, texts)
        if np.isnan(scores.rewards_B).all():
            raise InputError(
                f"training.reward={self._training.reward}: none of {len(texts)} answers has a "
                f"reward; the first: {scores.reasons[0]}"
            )
        return scores.rewards_B

    def _batch(self, part: int, weights: Params) -> dict[str, np.ndarray]:
        """The batch of an update: an equal part of the iteration's groups."""
        training, current = self._training, self._current
        assert current is not None
        answers = current.rollouts.answers
        size = len(answers) // training.updates
        some = slice(part * size, (part + 1) * size)
        chosen = answers[some]
        if part:
            logprobs = self._of_answers(chosen, self._logprobs(weights, self._sequences(chosen)))
        else:
            logprobs = [answer.policy for answer in chosen if answer.policy is not None]
        advantages = np.concatenate([
            rollouts.advantages([answer.reward for answer in chosen[n : n + training.group_size]])
            for n in range(0, len(chosen), training.group_size)
        ])  # fmt: skip
        references = current.references[some] or logprobs
        sequences = [
            self._sequence(answer, *figures)
            for answer, *figures in zip(chosen, logprobs, references, advantages, strict=True)
        ]
        return packing.policy_batch(
            sequences, training.window, training.accumulate, self._shares_rows
        )

    def _sequence(
        self,
        answer: Answer,
        logprobs: np.ndarray,
        reference: np.ndarray,
        advantage: np.float32,
    ) -> Answered:
        prompt, count = self._prompts[answer.prompt].tokens, len(answer.tokens)
        policy = answer.policy
        assert policy is not None  # since the iteration began
        importance = np.minimum(np.exp(policy - answer.logprobs), self._training.importance_cap)
        figures = {
            policy_loss.LOGPROB: logprobs,
            policy_loss.POLICY: policy,
            policy_loss.REFERENCE: reference,
            policy_loss.IMPORTANCE: importance,
            policy_loss.ADVANTAGE: np.full(count, advantage),
        }
        return Answered(
            [*prompt, *answer.tokens],
            [False] * len(prompt) + [answer.reward is not None] * count,
            {name: np.pad(values, (len(prompt) - 1, 0)) for name, values in figures.items()},
        )

    def _end(self) -> None:
        """Reports the iteration that was trained last."""
        if self._current is None:
            return
        iteration, batch, references, start = self._current
        valid = [answer.reward for answer in batch.answers if answer.reward is not None]
        lengths = [len(answer.tokens) for answer in batch.answers]
        divergence = None
        if references:
            excess = np.concatenate([
                reference - answer.policy
                for answer, reference in zip(batch.answers, references, strict=True)
            ])  # fmt: skip
            divergence = float((np.exp(excess) - excess - 1).mean())
        self._report(
            Iteration(
                iteration,
                float(np.mean(valid)) if valid else float("nan"),
                1 - len(valid) / len(batch.answers),
                float(np.mean(lengths)),
                sum(lengths),
                divergence,
                batch.max_gap,
                batch.mean_gap,
                batch.seconds,
                time.perf_counter() - start,
            )  # fmt: skip
        )
        self._current = None

    def _join(self) -> None:
        """Waits for the answers that are being sampled: the engine is for one thread at a time."""
        while self._pending:
            self._pending.pop(min(self._pending)).result()

    def _sequences(self, answers: Sequence[Answer]) -> list[list[int]]:
        return [[*self._prompts[answer.prompt].tokens, *answer.tokens] for answer in answers]

    @staticmethod
    def _of_answers(answers: Sequence[Answer], logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Those of the answers' tokens, of log-probabilities of whole sequences."""
        return [
            whole[-len(answer.tokens) :] for answer, whole in zip(answers, logprobs, strict=True)
        ]

    def _path(self, iteration: int) -> Path:
        return self._folder / f"{iteration:08d}.jsonl"

    def _read(self, iteration: int) -> Rollouts:
        if not self._path(iteration).exists():
            self._raise_lost(iteration)
        return Rollouts.read(self._path(iteration))

    def _raise_lost(self, iteration: int) -> None:
        raise InputError(
            f"{self._path(iteration)}: the answers of this iteration are missing, and the weights "
            "that sampled them are no more; remove the folder of the checkpoints to start over"
        )

    def _forget(self, first: int) -> None:
        """Removes the answers of iterations before one."""
        for path in self._folder.glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) < first:
                path.unlink()


class _Current(NamedTuple):
    """The iteration that is trained: its answers, log-probabilities of their tokens by the
    reference, if there is one, and when it began, the wait for answers aside.
    """

    iteration: int
    rollouts: Rollouts
    references: list[np.ndarray]
    start: float
