"""The metadata of a `.gguf` file, written from a `ModelConfig`: the inverse of `gguf_metadata`.

What is written is read back and has to give the same model: a field that no architecture writes
here is an error, never a loss.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Linear
from configs.model import ModelConfig
from inference.families import families
from inference.families.family import GgufWriter
from inference.families.shared import gguf_states
from inference.families.shared.gguf_keys import LAYER_EPSILON, RMS_EPSILON
from inference.families.shared.gguf_states import Metadata


def of_model(config: ModelConfig) -> Metadata:
    """Returns the metadata of a model; raises an `InputError` if llama.cpp lacks it."""
    writer = writer_of(config)
    base = _state_metadata if writer.has_states else _attention_metadata
    has_experts = any(isinstance(layer.ffn, Experts) for layer in config.layers)
    architecture = (has_experts and writer.experts_architecture) or writer.architecture
    metadata = base(config) | writer.metadata(config)
    general = {"general.architecture": architecture, "general.name": config.name}
    return general | {f"{architecture}.{key}": value for key, value in metadata.items()}


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


def _attention_metadata(config: ModelConfig) -> Metadata:
    for layer in config.pattern:
        if not isinstance(layer.mixer, Attention) or not isinstance(layer.ffn, Gated | Plain):
            kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
            raise InputError(f"{config.name}: a layer of {kinds} is not written as .gguf")
    attention, ffn = config.mixers(Attention)[0], config.layers[0].ffn
    assert isinstance(ffn, Gated | Plain)
    return {
        **_sizes(config),
        "feed_forward_length": ffn.width,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_width,
        "attention.value_length": attention.head_width,
        RMS_EPSILON if config.norm == "rms" else LAYER_EPSILON: config.norm_eps,
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
    """Returns the model as llama.cpp takes it: by its family there, and without factors that its
    weights take up.

    Raises:
        InputError: its family is not written, or a factor cannot be in the weights.
    """
    writer = writer_of(config)
    return dataclasses.replace(writer.fold(config), family=writer.read_as or config.family)


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
