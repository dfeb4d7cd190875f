"""What processes compare before they work together."""

import dataclasses

import jax

from configs.engine import Config
from inference.checkpoints import provenance
from inference.checkpoints.checkpoint import Checkpoint
from inference.runtime.serialization import key

_PROTOCOL = "1"  # of `inference/prefill/peer.py`


def of_model(config: Config, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Facts of the code, the model and its weights, by what an error calls them."""
    facts = {"version of jax": jax.__version__, "code": key.sources()}
    for field in dataclasses.fields(config.model):
        facts[f"model.{field.name}"] = repr(getattr(config.model, field.name))
    if checkpoint is not None:
        facts["checkpoint"] = provenance.weights_digest(checkpoint)[:16]
    return facts


def of_pages(config: Config, implementations: str, checkpoint: Checkpoint) -> dict[str, str]:
    """Facts that bytes of cached pages depend on: what they hold, and how. `implementations` are
    the runner's.
    """
    return of_model(config, checkpoint) | {
        "protocol of prefill processes": _PROTOCOL,
        "implementation of products and attention": implementations,
        "engine.cache.page_tokens": str(config.page_tokens),
        "engine.cache.row_multiple": str(config.engine.cache.row_multiple or 1),
        "engine.deterministic": str(config.engine.deterministic),
        "mesh.model": str(config.mesh.model),
    }
