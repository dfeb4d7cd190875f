"""What processes compare before they work together."""

import dataclasses

import jax

from configs.engine import Config
from inference.checkpoints import provenance
from inference.checkpoints.checkpoint import Checkpoint
from inference.runtime.serialization import key


def of_model(config: Config, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Facts of the code, the model and its weights, by what an error calls them."""
    facts = {"version of jax": jax.__version__, "code": key.sources()}
    for field in dataclasses.fields(config.model):
        facts[f"model.{field.name}"] = repr(getattr(config.model, field.name))
    if checkpoint is not None:
        facts["checkpoint"] = provenance.weights_digest(checkpoint)[:16]
    return facts
