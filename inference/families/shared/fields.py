"""What the architectures of many families write alike in their `config.json`."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.model import MOST_LAYERS, LayerSpec
from inference.families.shared.config_keys import Keys

Pattern = tuple[LayerSpec, ...]


def llama_fields(
    keys: Keys, name: str, family: str, tied: bool = False, eps: float = 1e-6
) -> dict[str, Any]:
    """What all of Llama's relatives write alike; the defaults are those of their transformers
    classes.
    """
    return {
        "name": name,
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "width": keys.integer("hidden_size"),
        "num_layers": keys.integer("num_hidden_layers", limit=MOST_LAYERS),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "tied": keys.boolean("tie_word_embeddings", tied),
    }


def attention(keys: Keys, head_width: int | None = None, **own: Any) -> Attention:
    """Heads and biases as all of Llama's relatives write them, and what a family adds."""
    num_heads = keys.integer("num_attention_heads")
    width = head_width or max(keys.integer("hidden_size") // num_heads, 1)
    has_bias = keys.boolean("attention_bias", False)  # of all four projections
    fields = {
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_width": keys.integer("head_dim", width),
        "biases": ("qkv", "out") if has_bias else (),
    }
    return Attention(**fields | own)


def gated(keys: Keys) -> Gated:
    """The feed-forward of all of Llama's relatives; `mlp_bias` means all three projections."""
    return Gated(
        keys.integer("intermediate_size"),
        keys.choice("hidden_act", {"silu": "silu"}, "silu"),
        keys.boolean("mlp_bias", False),
    )


def upper_windows(keys: Keys, full: Attention) -> Pattern:
    """Qwen's rule: where windows are used at all, layers from `max_window_layers` on have one."""
    is_used = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window", 4096) if is_used else None
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    first = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    repeated = types(layer >= first for layer in range(layers))
    sliding = dataclasses.replace(full, window=window)
    return pattern(by_type(keys, full, sliding, repeated), gated(keys))


def num_layers(keys: Keys) -> int:
    """Returns how many layers a configuration states."""
    return keys.integer("num_hidden_layers", limit=MOST_LAYERS)


def types(slides: Iterable[bool]) -> list[str]:
    """Names of kinds of layers, as `layer_types` lists them."""
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def numbered(keys: Keys, key: str, layers: int) -> set[int]:
    """Layers that a key lists by their numbers, from 0 on; none, where it is absent."""
    listed = keys.raw.get(key) or []
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise InputError(f"{keys.label}{key} lists numbers of layers, not {shown(listed)}")
    if unknown := [each for each in listed if not 0 <= each < layers]:
        raise InputError(
            f"{keys.label}{key} names layer {unknown[0]} of {layers}; valid: 0 to {layers - 1}"
        )
    return set(listed)


def by_type(
    keys: Keys, full: Attention, sliding: Attention, repeated: Sequence[str]
) -> list[Attention]:
    """Every layer by `layer_types`, or by names that repeat where the file lists none."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    names = keys.listed("layer_types", layers)
    for kind in names or ():
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(kinds)}"
            )
    names = names or [repeated[layer % len(repeated)] for layer in range(layers)]
    return [kinds[kind] for kind in names]


def pattern(mixers: Sequence[Mixer], ffns: FeedForward | Sequence[FeedForward | None]) -> Pattern:
    """The pattern that repeats. One feed-forward is that of all layers."""
    own: Sequence[FeedForward | None] = (
        [ffns] * len(mixers) if isinstance(ffns, FeedForward) else ffns
    )
    return repeated(list(map(LayerSpec, mixers, own)))


def repeated(layers: Sequence[LayerSpec]) -> Pattern:
    """The pattern that repeats, by its longest border (Knuth, Morris & Pratt 1977): a file may list
    thousands of layers.
    """
    borders = [0]
    for layer in layers[1:]:
        border = borders[-1]
        while border and layer != layers[border]:
            border = borders[border - 1]
        borders.append(border + (layer == layers[border]))
    return tuple(layers[: len(layers) - borders[-1]])
