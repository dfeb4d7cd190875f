"""Windows of a text that a student continues, so that it learns where its own words take it
(generalized knowledge distillation, Agarwal et al. 2023, arXiv 2306.13649).
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from configs.model import ModelConfig
from configs.recipes.training import Distillation
from inference.request import SamplingParams
from inference.training import distillation, losses
from inference.training.grpo import Policy
from inference.training.windows import Windows
from layers.params import Params


class StudentWindows:
    """`loop.PolicyData`: windows, of which `training.on_policy` is the probability that an engine
    continues one behind its first half. The engine, which `load` returns when it is first needed,
    is updated in place before it does.
    """

    def __init__(
        self,
        windows: Windows,
        training: Distillation,
        model: ModelConfig,
        load: Callable[[], Policy],
    ):
        self._windows, self._training = windows, training
        self._load = load
        self._engine: Policy | None = None
        self._declared = jax.jit(losses.whole(model))

    def sampled(self, step: int, params: Params, frozen: object) -> Mapping[str, np.ndarray]:
        """{"tokens": i32[batch, W + 1]}, as `loop.PolicyData`."""
        training = self._training
        tokens_YW = self._windows.batch(step)["tokens"]
        rng = np.random.default_rng((training.seed, step))
        rows = np.flatnonzero(rng.random(len(tokens_YW)) < training.on_policy)
        if not len(rows):
            return {"tokens": tokens_YW}
        if self._engine is None:
            self._engine = self._load()
        student = distillation.student_of(params, training)
        self._engine.update_params(self._declared(student, None), version=step + 1)
        half = tokens_YW.shape[1] // 2
        completions = self._engine.generate(
            tokens_YW[rows, :half].tolist(),
            [
                SamplingParams(
                    max_new_tokens=tokens_YW.shape[1] - half, temperature=1.0, seed=int(seed),
                    ignore_eos=True,
                )
                for seed in rng.integers(0, 1 << 63, len(rows))
            ],
        )  # fmt: skip
        tokens_YW[rows, half:] = [completion.token_ids for completion in completions]
        return {"tokens": tokens_YW}
