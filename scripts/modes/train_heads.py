"""`train --task=medusa` and `--task=eagle`: heads for a model, on what it writes itself."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import Heads
from configs.recipes import heads as recipes
from configs.recipes.training import Recipe
from scripts import common

TASKS = tuple(recipes.TRAINING)
_SEQUENCES = 32  # that a model writes at the same time


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        recipe: model and training.
        vocabulary: of the tokens, `start.Vocabulary`.
        tokens: what it is trained on.
        text: a digest that names them.
        starts_from: the checkpoint that training goes on from, if any.
        loss: `loop.Loss`.
        start: (progress) -> parameters, and what the loss needs beside them.
    """

    recipe: Recipe
    vocabulary: Any
    tokens: np.ndarray
    text: str
    starts_from: Any
    loss: Any
    start: Callable[[Any], tuple[Any, Any]]


def subject(task: str, checkpoint: Any, text: str | None) -> Subject:
    """Heads for a checkpoint.

    Args:
        task: one of `TASKS`.
        checkpoint: of the target.
        text: the file that they are trained on; None: what the target writes.
    """
    from inference.checkpoints import provenance
    from inference.training import losses, own_samples, start, texts, token_file

    target = checkpoint.config
    if target.has_states:
        raise InputError(f"{target.name} keeps states: heads are trained for attention models")
    digest, vocabulary = (
        provenance.weights_digest(checkpoint),
        start.vocabulary(checkpoint, (), target.vocab_size),
    )
    training = overrides.apply(
        Recipe(target, recipes.TRAINING[task]),
        [each for each in common.settings_asked() if not each.startswith("model.")],
    )
    if training.mesh.num_chips > 1:
        raise InputError("heads are trained on one chip: leave --mesh out")
    if text is not None:
        with common.bars() as progress:
            tokens, name = token_file.of_texts(texts.of_file(text), vocabulary, progress)
    else:
        window = training.training.window
        first = own_samples.opening(vocabulary.tokenizer)
        described = digest, window, recipes.SAMPLES, recipes.SAMPLE_TEMPERATURE, first
        name = hashlib.sha256(repr(described).encode()).hexdigest()
        tokens = token_file.kept(
            name,
            lambda: own_samples.write(_generator(checkpoint), first, recipes.SAMPLES, window),
            target.vocab_size,
        )
    ids = own_samples.most_frequent(tokens, recipes.PROPOSED)
    make, loss = getattr(recipes, task), getattr(losses, task)
    model = make(target, digest, ids if len(ids) < target.vocab_size else ())
    changed = overrides.apply(dataclasses.replace(training, model=model), common.settings_asked())
    own = changed.model
    assert isinstance(own, Heads)

    def begin(progress: Any) -> tuple[Any, Any]:
        frozen = start.masters(Recipe(target, changed.training), checkpoint, progress)
        values = start.masters(changed)
        table = (frozen["embed"] if target.tied else frozen["head"])["table"]
        rows = np.array(own.proposed_ids or range(target.vocab_size))
        return values | {"head": {"table": table[rows]}}, frozen

    return Subject(changed, vocabulary, tokens, name, None, loss(target, own), begin)


def _generator(checkpoint: Any) -> Callable[[list[list[int]], int], list[list[int]]]:
    """What continues openings with the checkpoint itself."""

    def generate(openings: list[list[int]], num_tokens: int) -> list[list[int]]:
        from inference.request import SamplingParams

        longest = max(map(len, openings)) + num_tokens
        settings = EngineConfig(
            max_seqs=_SEQUENCES, max_context=longest, decode_rows=(_SEQUENCES,), seed=0
        )
        engine = common.load_engine(checkpoint, Config(checkpoint.config, settings))
        params = [
            SamplingParams(
                max_new_tokens=num_tokens, temperature=recipes.SAMPLE_TEMPERATURE, seed=nth,
                ignore_eos=True,
            )
            for nth in range(len(openings))
        ]  # fmt: skip
        with common.bars() as progress:
            done = 0

            def count(output: Any) -> None:
                nonlocal done
                done += output.finish_reason is not None
                progress(done, len(openings), "writing samples")

            return [each.token_ids for each in engine.generate(openings, params, count)]

    return generate
