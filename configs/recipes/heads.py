"""Heads for a model, trained on what it writes itself.

python -m scripts.train --task=eagle --model=smollm2-135m
python -m scripts.train --task=medusa --model=smollm2-135m
"""

import dataclasses
from typing import TypeVar

from configs.heads import Eagle, Heads, Medusa
from configs.model import ModelConfig
from configs.recipes.training import TrainingConfig

SAMPLES = 1024  # windows that the target writes
SAMPLE_TEMPERATURE = 0.7
PROPOSED = 10_000  # tokens, the most frequent of the samples; as many as a config.json may list

H = TypeVar("H", bound=Heads)

# By task.
TRAINING = {
    "eagle": TrainingConfig(
        steps=448, batch=4, window=256, learning_rate=1e-3, warmup_steps=40, checkpoint_every=60,
    ),
    "medusa": TrainingConfig(
        steps=256, batch=4, window=256, learning_rate=1e-3, warmup_steps=40, checkpoint_every=60,
    ),
}  # fmt: skip


def eagle(target: ModelConfig, digest: str, proposed_ids: tuple[int, ...]) -> Eagle:
    """One layer as the target's last that caches, on features near its first, its middle and its
    last.
    """
    last = target.num_layers
    features = tuple(sorted({min(2, last), -(-last // 2), max(1, last - 3)}))
    specs = zip(target.layers, target.cache_specs, strict=True)
    layer = [layer for layer, spec in specs if spec.owner is None][-1:]
    return _heads(
        Eagle, target, num_layers=1, pattern=tuple(layer), target=digest,
        proposed_ids=proposed_ids, features=features,
    )  # fmt: skip


def medusa(target: ModelConfig, digest: str, proposed_ids: tuple[int, ...]) -> Medusa:
    """Four heads."""
    return _heads(
        Medusa, target, num_layers=0, pattern=(), target=digest, proposed_ids=proposed_ids
    )


def _heads(kind: type[H], model: ModelConfig, /, **changes: object) -> H:
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}
    alone = "learned_positions", "layer_inputs", "has_layer_scales", "hyper_connections"
    for name in ("num_layers", "pattern", "formats", *alone):
        del fields[name]
    fields |= {"logit_cap": None, "logit_scale": 1.0, "tied": False, "dtype": "float32"}
    return kind(**fields | {"name": f"{model.name}-{kind.__name__.lower()}"} | changes)
