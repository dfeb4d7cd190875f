"""Children of the golden checkpoints, and what their parents compute without what was removed."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from inference.checkpoints import convert, provenance, resolve, text_files
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.prune import export, selection
from inference.prune.importance import Importance, Method
from layers import decoder, params
from layers.ragged import contiguous
from tests import compiling

GOLDEN = Path(__file__).parents[2] / "golden"
METHOD = Method()
NO_EPS = 1e-12  # of norms, so that a norm of fewer channels is a norm of all times a factor


def opened(folder):
    return resolve.resolve(str(folder)).open(None)


def windows(config, count=6, size=16, seed=1):
    return (
        np.random.default_rng(seed).integers(0, config.vocab_size, (count, size)).astype(np.int32)
    )


def scored(folder, work, method=METHOD, stop=None, tokens=None):
    """A checkpoint and its importance."""
    checkpoint = opened(folder)
    parts = Parts(work, {"model": str(folder)})
    importance = Importance(Reader(checkpoint.contents(), checkpoint.config), method, parts)

    def progress(done, total, label):
        if done == stop:
            raise KeyboardInterrupt

    importance.run(windows(checkpoint.config) if tokens is None else tokens, progress)
    return checkpoint, importance


def child_of(folder, output, widths, to="hf", method=METHOD, is_contiguous=False):
    """What a checkpoint is pruned to, in float32."""
    work = output.with_name(f"{output.name}.pruning")
    checkpoint, importance = scored(folder, work, method)
    count = widths.get("layers", checkpoint.config.num_layers)
    layers = selection.layers(importance, count, is_contiguous)
    stays = selection.select(importance, widths, layers)
    pruned = export.checkpoint(checkpoint, widths, stays, {})
    convert.convert(pruned, output, to, "float32")
    return provenance.stages(text_files.read(output))[0]


def loaded(folder):
    """Configuration in float32 whose norms add next to nothing, and parameters by path."""
    checkpoint = opened(folder)
    config = dataclasses.replace(checkpoint.config, dtype="float32")
    values = params.flatten(checkpoint.load_params(decoder.param_infos(config)))
    norms = {"norm_eps": NO_EPS} if has_latents(config) else {}
    config = dataclasses.replace(config.with_kinds(**norms), norm_eps=NO_EPS)
    return config, {path: np.array(value) for path, value in values.items()}


def has_latents(config):
    return any(layer.mixer.name == "latent" for layer in config.layers)


def logits(config, values, tokens_T=None):
    tokens_T = windows(config, 1, 12, seed=7)[0] if tokens_T is None else tokens_T
    weights = params.unflatten(
        config.parameters(), {p: jax.numpy.asarray(v) for p, v in values.items()}
    )

    def run(weights):
        hidden_TD, _ = decoder.forward(weights, config, tokens_T, contiguous(1, len(tokens_T)))
        return decoder.logits(weights, config, hidden_TD)

    return np.asarray(compiling.call(run, weights))
