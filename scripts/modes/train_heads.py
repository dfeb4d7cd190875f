"""`train --task=medusa` and `--task=eagle`: heads for a model, on what it writes itself."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import Heads
from configs.model import ModelConfig
from configs.recipes import heads as recipes
from configs.recipes.training import Recipe
from scripts import common

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.load import Progress
    from inference.training.start import Subject

TASKS = tuple(recipes.TRAINING)
_SEQUENCES = 32  # that a model writes at the same time
_LEAST_WINDOW = 16  # tokens behind the opening


def subject(task: str, checkpoint: "Checkpoint", text: str | None) -> "Subject":
    """Heads for a target's checkpoint, trained on a file, or (`text` is None) on its own output."""
    from inference.checkpoints import provenance
    from inference.training import gap_windows, losses, own_samples, start, texts, token_file
    from inference.training.loop import Loss
    from layers.params import Params

    makes: dict[str, tuple[Callable[..., Heads], Callable[..., Loss]]] = {
        "medusa": (recipes.medusa, losses.medusa),
        "eagle": (recipes.eagle, losses.eagle),
    }
    make, loss = makes[task]
    target = checkpoint.config
    if target.has_states:
        raise InputError(f"{target.name} keeps states: heads are trained for attention models")
    digest = provenance.weights_digest(checkpoint)
    vocabulary = start.vocabulary(checkpoint, (), target.vocab_size)
    recipe = _recipe(Recipe(make(target, digest, ()), recipes.TRAINING[task]), target)
    window = recipe.training.window
    first = [] if text else own_samples.opening(vocabulary.tokenizer)
    least = len(first) + _LEAST_WINDOW
    if window < least:
        raise InputError(f"training.window is at least {least} for these heads, not {window}")
    if text:
        with common.bars() as progress:
            tokens, name = token_file.of_texts(texts.of_file(text), vocabulary, progress)
    else:
        tokens, name = own_tokens(checkpoint, digest, first, recipes.SAMPLES, window)
    ids = own_samples.most_frequent(tokens, recipes.PROPOSED)
    assert isinstance(recipe.model, Heads)
    head_config = dataclasses.replace(
        recipe.model, proposed_ids=ids if len(ids) < target.vocab_size else ()
    )
    recipe = dataclasses.replace(recipe, model=head_config)

    def begin(progress: "Progress | None") -> tuple[Params, Params | None]:
        frozen = start.masters(Recipe(target, recipe.training), checkpoint, progress)
        values = start.masters(recipe)
        table = (frozen["embed"] if target.tied else frozen["head"])["table"]
        rows = np.array(head_config.proposed_ids or range(target.vocab_size))
        return values | {"head": {"table": table[rows]}}, frozen

    data, size = gap_windows.of_text(tokens, recipe.training, vocabulary.tokenizer)
    return start.Subject(
        recipe, vocabulary, data, size, name, recipe.training.batch * window, None,
        loss(target, head_config), begin,
    )  # fmt: skip


def own_tokens(
    checkpoint: "Checkpoint", digest: str, first: list[int], count: int, window: int
) -> tuple[np.ndarray, str]:
    """What a model writes by itself behind the tokens `first`, kept in the cache: ids of windows
    one after the other, and a digest that names them. `digest` is that of its weights.
    """
    from inference.training import own_samples, token_file

    described = digest, window, count, recipes.SAMPLE_TEMPERATURE, first
    name = hashlib.sha256(repr(described).encode()).hexdigest()
    tokens = token_file.cached(
        name,
        lambda: own_samples.write(generator(checkpoint), first, count, window),
        checkpoint.config.vocab_size,
    )
    return tokens, name


def _recipe(recipe: Recipe, target: ModelConfig) -> Recipe:
    """With what --set says, as far as it suits the target."""
    changed = overrides.apply(recipe, common.settings_asked())
    assert isinstance(changed.model, Heads)
    changed.model.check_target(target)
    if changed.mesh.num_chips > 1:
        raise InputError("heads are trained on one chip: leave --mesh out")
    return changed


def generator(checkpoint: "Checkpoint") -> Callable[[list[list[int]], int], list[list[int]]]:
    def generate(openings: list[list[int]], num_tokens: int) -> list[list[int]]:
        from inference.outputs import RequestOutput
        from inference.request import SamplingParams

        longest = max(map(len, openings)) + num_tokens
        settings = EngineConfig.of(
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

            def count(output: RequestOutput) -> None:
                nonlocal done
                done += output.finish_reason is not None
                progress(done, len(openings), "writing samples")

            return [completion.token_ids for completion in engine.generate(openings, params, count)]

    return generate
