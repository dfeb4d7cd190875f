"""Tiny models with rows of whole groups, as directories; numbers that a model might see."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import resolve, text_files
from inference.layerwise.input_statistics import InputStatistics
from inference.training import export
from layers import decoder
from tests import fakes

TOKENIZER = Path(__file__).parents[2] / "golden" / "llama-tokenizer"
VOCAB = 320


_ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_width=16)


def llama(**changes) -> ModelConfig:
    """Two layers, whose rows have 64 and 96 numbers."""
    return _of(**{"pattern": (LayerSpec(_ATTENTION, Gated(96)),)} | changes)


def mixture() -> ModelConfig:
    """Two layers of four experts, and one that every token visits."""
    return _of((LayerSpec(_ATTENTION, Experts(4, 2, 32, shared_width=64)),))


def latent() -> ModelConfig:
    """Latent attention, before a dense feed-forward and before experts."""
    mixer = Latent(4, rank=32, rope_width=8, nope_width=32, value_width=16, query_rank=32)
    return _of((LayerSpec(mixer, Gated(96)), LayerSpec(mixer, Experts(4, 2, 32))))


def _of(pattern: tuple[LayerSpec, ...], **changes) -> ModelConfig:
    fields = {"width": 64, "num_layers": 2, "max_context": 128, "dtype": "float32"}
    return ModelConfig("tiny", "llama", VOCAB, pattern=pattern, **fields | changes)


def written(config: ModelConfig, folder: Path, change=lambda values: values) -> Path:
    """A directory of a model with random weights, which `change` may make others of."""
    rng = np.random.default_rng(5)
    values = jax.tree.map(
        lambda leaf: leaf if leaf.ndim > 1 else leaf * rng.uniform(0.5, 2, leaf.shape),
        fakes.real_params(config),
    )
    eos_ids = resolve.resolve(str(TOKENIZER)).open(None).eos_ids
    export.write(change(values), config, eos_ids, text_files.read(TOKENIZER), folder)
    return folder


def loaded(folder: Path, dtype: str = "float32"):
    """The model that a directory holds, without formats, and its parameters."""
    checkpoint = resolve.resolve(str(folder)).open(None)
    config = dataclasses.replace(checkpoint.config, dtype=dtype, formats=())
    return config, checkpoint.load_params(decoder.param_infos(config))


def inputs(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Rows whose elements go together, some larger than others."""
    mixed = rng.normal(size=(width, width)) / width**0.5
    return (rng.normal(size=(count, width)) @ mixed * np.exp(rng.normal(size=width))).astype(
        np.float32
    )


def seen_of(x_XD: np.ndarray) -> InputStatistics:
    """What calibration sees of such rows."""
    wide = x_XD.astype(np.float64)
    largest, products = np.abs(x_XD).max(0), wide.T @ wide
    return InputStatistics(np.int64(len(x_XD)), np.abs(wide).sum(0), largest, x_XD, products)
