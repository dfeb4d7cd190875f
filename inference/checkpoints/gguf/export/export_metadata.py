"""The metadata of a `.gguf` file, written from a `ModelConfig`: the inverse of `gguf_metadata`.

What is written is read back and has to give the same model: a field that no architecture writes
here is an error, never a loss.
"""

import dataclasses
from typing import Any

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.latent import Latent
from configs.kinds.rope import Linear
from configs.model import ModelConfig
from inference.families import families
from inference.families.family import GgufReader, GgufWriter
from inference.families.shared import gguf_latents, gguf_mixtures, gguf_states
from inference.families.shared.gguf_keys import RMS_EPSILON
from inference.families.shared.gguf_states import Metadata


def of_model(config: ModelConfig) -> Metadata:
    """Returns the metadata of a model; raises an `InputError` if llama.cpp lacks it."""
    writer = writer_of(config)
    has_experts = any(isinstance(layer.ffn, Experts) for layer in config.layers)
    architecture = (has_experts and writer.experts_architecture) or writer.architecture
    _, reader = families.gguf_readers()[architecture]
    base = _state_metadata(config) if writer.has_states else _metadata(config, reader)
    general = {"general.architecture": architecture, "general.name": config.name}
    keys = base | writer.metadata(config)
    return general | {f"{architecture}.{key}": value for key, value in keys.items()}


def writer_of(config: ModelConfig) -> GgufWriter:
    """Returns how files of a model are written; raises an `InputError` if they are not."""
    writers = {
        name: family.gguf.writer
        for name, family in families.ALL.items()
        if family.gguf and family.gguf.writer
    }
    if config.family not in writers:
        raise InputError(
            f"{config.name}: the family {config.family} is not written as .gguf; valid: "
            f"{', '.join(writers)}"
        )
    return writers[config.family]


def _state_metadata(config: ModelConfig) -> Metadata:
    return {RMS_EPSILON: config.norm_eps} | _sizes(config) | gguf_states.metadata(config)


def _metadata(config: ModelConfig, reader: GgufReader) -> Metadata:
    """Returns the keys of sizes, norms, positions, and of what each layer does."""
    record = families.of(config)
    for layer in config.pattern:
        if isinstance(layer.mixer, record.mixers) and isinstance(layer.ffn, record.feed_forwards):
            continue
        kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
        raise InputError(f"{config.name}: a layer of {kinds} is not written as .gguf")
    widths = [layer.ffn.width for layer in config.layers if isinstance(layer.ffn, Gated | Plain)]
    mixture = gguf_mixtures.metadata(config)
    return {
        **_sizes(config),
        "feed_forward_length": widths[0] if widths else mixture["expert_feed_forward_length"],
        RMS_EPSILON if config.norm == "rms" else reader.epsilon: config.norm_eps,
        **(gguf_latents.metadata(config) if config.mixers(Latent) else _heads(config)),
        **{key: value for key, value in mixture.items() if key in reader.reads},
    }


def _heads(config: ModelConfig) -> Metadata:
    attention = next(iter(config.mixers(Attention)), None)
    if attention is None:
        return {}
    return {
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_width,
        "attention.value_length": attention.head_width,
        **_rope(config),
    }


def _sizes(config: ModelConfig) -> Metadata:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.width,
        "block_count": config.num_layers,
    }


def renamed(config: ModelConfig) -> ModelConfig:
    """Returns the model as llama.cpp takes it: by its family there, without factors that its
    weights take up, and with positions by numbers of float32.

    Raises:
        InputError: its family is not written, or a factor cannot be in the weights.
    """
    writer = writer_of(config)
    folded = writer.fold(config)
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(mixer, rope=_in_float32(mixer.rope)))
        if isinstance(mixer := layer.mixer, Attention | Latent)
        else layer
        for layer in folded.pattern
    ]
    return dataclasses.replace(
        folded, pattern=tuple(layers), family=writer.read_as or config.family
    )


def _in_float32(value: Any) -> Any:
    """Returns positions with the shortest decimals that round to the same float32: as numbers of
    metadata are read.
    """
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{name: _in_float32(field) for name, field in fields.items()})
    return value


def _rope(config: ModelConfig) -> Metadata:
    """Of the layers that see all tokens, where others have positions of their own."""
    mixers = sorted(config.mixers(Attention), key=lambda mixer: mixer.window is not None)
    rope = next((mixer.rope for mixer in mixers if mixer.rope is not None), None)
    if rope is None:
        return {}
    metadata: Metadata = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": rope.rotating(mixers[0].head_width),
    }
    if isinstance(rope.scaling, Linear):
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.scaling.factor}
    if original := getattr(rope.scaling, "original_context", None):
        metadata["rope.scaling.original_context_length"] = original
    return metadata
