"""The metadata of a `.gguf` file, written from a `ModelConfig`: the inverse of `gguf_metadata`.

What is written is read back and has to give the same model: a field that no architecture writes
here is an error, never a loss.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Linear, Rope
from configs.model import ModelConfig
from inference.checkpoints.gguf.export import export_states
from inference.checkpoints.hf.architectures import export_fields

Metadata = dict[str, Any]  # integers become uint32, other numbers float32


class _Family(NamedTuple):
    """What llama.cpp calls a family, and what it adds to the widths."""

    architecture: str
    build: Callable[[ModelConfig], Metadata] = lambda config: {}


def of_model(config: ModelConfig) -> Metadata:
    """The metadata of a model.

    Raises:
        InputError: llama.cpp has no such family, or no such layers.
    """
    if config.family in export_states.FAMILIES:
        metadata: Metadata = {"attention.layer_norm_rms_epsilon": config.norm_eps}
        metadata |= _sizes(config) | export_states.metadata(config)
        return _with_architecture(config, export_states.architecture(config), metadata)
    family = FAMILIES.get(config.family)
    if family is None:
        raise InputError(
            f"{config.name}: the family {config.family} is not written as .gguf; valid: "
            f"{', '.join((*FAMILIES, *export_states.FAMILIES))}"
        )
    for layer in config.pattern:
        if not isinstance(layer.mixer, Attention) or not isinstance(layer.ffn, Gated | Plain):
            kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
            raise InputError(f"{config.name}: a layer of {kinds} is not written as .gguf")
    attention, ffn = config.mixers(Attention)[0], config.layers[0].ffn
    epsilon = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    metadata = {
        **_sizes(config),
        "feed_forward_length": ffn.width,  # type: ignore[union-attr]
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_width,
        "attention.value_length": attention.head_width,
        f"attention.{epsilon}": config.norm_eps,
        **_rope(config),
        **family.build(config),
    }
    return _with_architecture(config, family.architecture, metadata)


def _sizes(config: ModelConfig) -> Metadata:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.width,
        "block_count": config.num_layers,
    }


def _with_architecture(config: ModelConfig, architecture: str, metadata: Metadata) -> Metadata:
    general = {"general.architecture": architecture, "general.name": config.name}
    return general | {f"{architecture}.{key}": value for key, value in metadata.items()}


def renamed(config: ModelConfig) -> ModelConfig:
    """The model as llama.cpp takes it: by its family, and without factors that weights take up."""
    config = export_states.folded(config)
    return dataclasses.replace(config, family=_READ_AS.get(config.family, config.family))


def check(config: ModelConfig, read_back: ModelConfig) -> None:
    """Compares a model with what its file says.

    Raises:
        InputError: naming the first field that differs.
    """
    for field in dataclasses.fields(ModelConfig):
        name = "layers" if field.name == "pattern" else field.name
        is_same = getattr(config, name) == getattr(read_back, name)
        if name not in ("name", "dtype", "formats") and not is_same:
            raise InputError(
                f"{config.name}: model.{field.name} has no place in a .gguf file of the family "
                f"{config.family}; --to=orbax keeps it"
            )


def _rope(config: ModelConfig) -> Metadata:
    """Of the layers that see all tokens, where others have positions of their own."""
    mixers = sorted(config.mixers(Attention), key=lambda mixer: mixer.window is not None)
    rope = next((mixer.rope for mixer in mixers if mixer.rope is not None), None)
    if rope is None:
        return {}
    metadata: Metadata = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": mixers[0].head_width,
    }
    if isinstance(rope.scaling, Linear):
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.scaling.factor}
    if original := getattr(rope.scaling, "original_context", None):
        metadata["rope.scaling.original_context_length"] = original
    return metadata


def _window(config: ModelConfig) -> Metadata:
    windows = [mixer.window for mixer in config.mixers(Attention) if mixer.window is not None]
    return {"attention.sliding_window": windows[0]} if windows else {}


def _gemma2(config: ModelConfig) -> Metadata:
    caps = [mixer.score_cap for mixer in config.mixers(Attention)]
    caps_by_key = {"attn_logit_softcapping": caps[0], "final_logit_softcapping": config.logit_cap}
    return _window(config) | {key: cap for key, cap in caps_by_key.items() if cap is not None}


def _gemma3(config: ModelConfig) -> Metadata:
    mixers = [export_fields.attention(layer) for layer in config.layers]
    slides = [mixer.window is not None for mixer in mixers]
    period = slides.index(False) + 1 if False in slides else len(slides) + 1
    near = next((mixer.rope for mixer in mixers if mixer.window is not None), None) or Rope()
    metadata = _window(config)
    if period != 6:
        metadata["attention.sliding_window_pattern"] = period
    if near.theta != 10_000.0:
        metadata["rope.freq_base_swa"] = near.theta
    return metadata


# Families that a file names as another; windows of Mistral's have no place there.
_READ_AS = {"mistral": "llama"}

FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama"),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "smollm3": _Family("smollm3"),
    "olmo2": _Family("olmo2"),
    "gemma2": _Family("gemma2", _gemma2),
    "gemma3": _Family("gemma3", _gemma3),
    "gpt2": _Family("gpt2"),
}
