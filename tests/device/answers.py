"""What an engine on the device at hand answers, by its kernels and by XLA alone."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs.model import ModelConfig
from inference.engine import Engine
from layers.backends import backends
from layers.kernels.device import target_device
from scripts.reports import agreement
from scripts.reports.agreement import Answer
from tests import fakes

_LENGTHS = (300, 70, 1, 128)  # of prompts, some longer than pages
_NEW_TOKENS = 40


def answers(
    engine: Engine, texts: Sequence[list[int]] | None = None
) -> tuple[list[Answer], Sequence[list[int]]]:
    """Greedy answers to prompts that are served together, then scores of texts in chunks; and the
    texts, which are the prompts and their answers unless told.

    Args:
        engine: whose vocabulary has 131 tokens, with `top_logprobs`.
    """
    prompts = fakes.prompts(_LENGTHS, 131)
    decoded = engine.generate(prompts, fakes.greedy(_NEW_TOKENS))
    texts = texts or [
        [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, decoded, strict=True)
    ]
    found = [Answer(each.token_ids, each.logprobs, each.top_logprobs) for each in decoded]
    for text, score in zip(texts, engine.score(texts), strict=True):
        found.append(Answer(text[1:], score.logprobs, []))
    return found, texts


@contextlib.contextmanager
def by_xla_alone() -> Iterator[None]:
    """Engines that are made and run in this context have none of our kernels."""
    platforms = {"gpu": backends.GPU, "cpu": backends.XLA_CPU}
    backend = platforms.get(target_device().platform, backends.XLA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "of", lambda device, linear=None: backend)
        yield


def check_engine(
    engine_of: Callable[[str | None, ModelConfig, Any], Engine],
    model: ModelConfig,
    attention: str | None = None,
) -> None:
    """By the device's kernels a model in bfloat16 is no farther from bfloat16 by XLA alone than
    that is from float32.

    Args:
        engine_of: (attention, model, parameters) -> engine.
        attention: the implementation beside the reference; None: the device's.
    """
    params = fakes.real_params(model)
    exact = dataclasses.replace(model, dtype="float32"), jax.tree.map(jnp.float32, params)
    with by_xla_alone():
        expected, texts = answers(engine_of("reference", *exact))
        rounded, _ = answers(engine_of("reference", model, params), texts)
    answered, _ = answers(engine_of(attention, model, params), texts)
    bound = agreement.compare(rounded, expected).worst
    assert agreement.compare(answered, rounded).worst <= bound
