"""How far log-probabilities of answers lie from the trainer's, by the engine that samples them."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.engine import Config, EngineConfig
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams
from inference.training.engine_logprobs import EngineLogprobs

_GROUP, _SEED = 16, 0


class Gap(NamedTuple):
    """Of an engine: tokens that were compared, and |differences| of their log-probabilities."""

    engine: str
    tokens: int
    largest: float
    mean: float


def of_engines(model: Path, prompts: list[str], max_new_tokens: int) -> list[Gap]:
    """Gaps of engines that differ from the trainer's kernels and types in one thing each."""
    resolved = resolve.resolve(str(model))
    settings = EngineConfig.of(max_seqs=64, deterministic=True)
    config = Config(dataclasses.replace(resolved.config, dtype="float32"), settings)
    plain = dataclasses.replace(settings, deterministic=False)
    kernels = plain.replace(linear="reference", attention="reference")
    in_bfloat16 = dataclasses.replace(config.model, dtype="bfloat16")
    engines = {
        "the trainer's types and kernels": config,
        "XLA's products and attention": dataclasses.replace(config, engine=kernels),
        "bfloat16 weights and cache": dataclasses.replace(config, model=in_bfloat16),
        "int8 weights": config.with_engine(weights="int8"),
    }
    gaps = []
    for name, engine_config in engines.items():
        checkpoint = resolved.open(None)
        engine = Engine.from_checkpoint(engine_config, checkpoint)
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=1.0, n=_GROUP, seed=_SEED
        )
        completions = engine.generate(prompts, params)
        answers = [answer for first in completions for answer in (first, *first.others)]
        most = max(len(answer.prompt_token_ids) for answer in answers) + max_new_tokens
        logprobs = EngineLogprobs(config, most)
        weights = logprobs.pack(Engine.from_checkpoint(config, checkpoint).export_params())
        sequences = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
        gap = np.concatenate([
            np.abs(whole[-len(answer.token_ids) :] - np.asarray(answer.logprobs, np.float32))
            for answer, whole in zip(answers, logprobs(weights, sequences), strict=True)
        ])  # fmt: skip
        gaps.append(Gap(name, len(gap), float(gap.max()), float(gap.mean())))
    return gaps
