"""Rollouts of Tunix's learners by an engine: `ClusterConfig(rollout_engine=functools.partial(
EngineRollout, engine=engine), ...)`. The only file that imports `tunix` and `flax`; docs/flax.md.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from configs.errors import InputError
from inference.outputs import Completion, Score
from inference.request import SamplingParams
from layers.params import Params

Result = TypeVar("Result")


class Policy(Protocol):
    """What is used of an `Engine`."""

    def generate(
        self, prompts: Sequence[list[int]], params: list[SamplingParams]
    ) -> list[Completion]: ...

    def score(self, texts: Sequence[list[int]]) -> list[Score]: ...

    def update_params(self, source: Params | str | Path) -> int: ...


class EngineRollout(base_rollout.BaseRollout):
    """Samples, scores and updated weights of one engine, whatever thread calls.

    A learner calls within its mesh and with transfers forbidden, which are settings of its threads;
    the engine's work runs on a thread without them.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        engine: Policy,
    ):
        """Gives the engine the weights of `rollout_actor`; Tunix passes all but the engine, whose
        mesh is its own.

        Raises:
            InputError: the actor is another model than the engine's, or has LoRA parameters.
        """
        del mesh, rollout_config
        self._tokenizer, self._engine = tokenizer, engine
        self._thread = ThreadPoolExecutor(1, "rollout")
        if jax.tree.leaves(nnx.state(rollout_actor, nnx.LoRAParam)):
            raise InputError(
                "the actor has LoRA parameters: an engine takes the weights of a whole model, so "
                "train all of them, or merge the adapter first"
            )
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: object
    ) -> base_rollout.RolloutOutput:
        """Samples an answer to each prompt; tokens end with the end token, where there is one.

        Raises:
            InputError: as `Engine.generate`; or log-probabilities are to be of another temperature
                than 1, of which the engine has none.
        """
        config = rollout_config
        if kwargs:
            raise InputError(f"generate has no argument {min(kwargs)!r}")
        if config.return_logprobs and config.temperature not in (0.0, 1.0):
            raise InputError(
                f"return_logprobs with temperature={config.temperature}: log-probabilities are the "
                "model's own; valid: temperature=1, or 0 for greedy answers"
            )
        inputs = [self._encode(prompt) for prompt in prompts]
        seeds: list[int | None] = [None] * len(prompts)
        if config.seed is not None:
            words = np.asarray(jax.random.key_data(jax.numpy.asarray(config.seed))).ravel()
            seeds = np.random.SeedSequence(words.tolist()).generate_state(len(prompts)).tolist()
        ends = tuple(config.eos_tokens or [self.eos_id()])
        params = [
            SamplingParams(
                max_new_tokens=config.max_tokens_to_generate, temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=max(config.top_k or 0, 0), seed=seed, stop_token_ids=ends, ignore_eos=True,
            )
            for seed in seeds
        ]  # fmt: skip
        completions = self._run(lambda: self._engine.generate(inputs, params))
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(completion.token_ids) for completion in completions],
            logits=[],
            tokens=[np.array(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=self._padded(inputs, config.max_prompt_length),
            logprobs=[np.array(completion.logprobs, np.float32) for completion in completions]
            if config.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probabilities of completions, f32[B, T] in nats; 0 where they are padded.

        Args:
            prompt_tokens: i32[B, P]; padding is left out wherever it is, as Tunix does.
            completion_tokens: i32[B, T].
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        is_token = completions != self.pad_id()
        rows = np.concatenate([prompts, completions], axis=1)
        inputs = [row[row != self.pad_id()].tolist() for row in rows]
        scores = self._run(lambda: self._engine.score(inputs))
        logprobs = np.zeros(completions.shape, np.float32)
        for row, positions, score in zip(logprobs, is_token, scores, strict=True):
            if count := positions.sum():
                row[positions] = score.logprobs[-count:]
        return jax.numpy.asarray(logprobs)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Goes on with the actor's weights, of which nothing is kept.

        Raises:
            InputError: as `Engine.update_params`; then the old ones stay.
        """
        del filter_types  # what `params` is of the actor's state: here all of its `nnx.Param`
        weights = params.filter(nnx.Param) if isinstance(params, nnx.State) else params
        self._run(lambda: self._engine.update_params(weights))

    def pad_id(self) -> int:
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """There is none of Tunix's: given the actor, learners take its weights for shared ones, and
        never update the engine's.
        """

    def _run(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(work).result()

    def _encode(self, prompt: str) -> list[int]:
        """Ids of a prompt, begun as Tunix's own sampler does."""
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [
            int(i) for i in self._tokenizer.dedup_bos_ids(begin + self._tokenizer.encode(prompt))
        ]

    def _padded(self, inputs: list[list[int]], width: int) -> np.ndarray:
        """Prompts in rows of `width`, or of the next power of two if one is longer: i32[B, P]."""
        longest = max(map(len, inputs))
        width = width if width >= longest else 1 << (longest - 1).bit_length()
        rows = np.full((len(inputs), width), self.pad_id(), np.int32)
        for row, ids in zip(rows, inputs, strict=True):
            row[width - len(ids) :] = ids
        return rows
