"""Reads the keys of `config.json` that many families share."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec
from inference.families.shared import rope_keys
from inference.families.shared.config_keys import Keys

Pattern = tuple[LayerSpec, ...]


class ModelFields(TypedDict, total=False):
    """Some fields of a `ModelConfig`, as readers of keys return them: their types are checked where
    `Family.model` makes it.
    """

    name: str
    family: str
    vocab_size: int
    width: int
    num_layers: int
    max_context: int
    pattern: tuple[LayerSpec, ...]
    norm_eps: float
    norm: str
    norm_offset: float
    pre_norms: bool
    post_norms: bool
    logit_cap: float | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    learned_positions: int
    layer_inputs: LayerInputs | None
    hyper_connections: HyperConnections | None
    has_layer_scales: bool
    tied: bool
    has_head_bias: bool


def llama_fields(
    keys: Keys, rope: Rope | None = None, tied: bool = False, eps: float = 1e-6
) -> ModelFields:
    """Returns the fields that Llama's relatives share, by the defaults of transformers.

    Args:
        rope: may stretch the context; None: the caller reads the context.
    """
    context: ModelFields = (
        {} if rope is None else {"max_context": rope_keys.max_context(keys, rope)}
    )
    return {
        **context,
        "vocab_size": keys.integer("vocab_size"),
        "width": keys.integer("hidden_size"),
        "num_layers": num_layers(keys),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "tied": keys.boolean("tie_word_embeddings", tied),
    }


def layer_normed(
    keys: Keys, rope: Rope, tied: bool = False, key: str = "layer_norm_eps"
) -> ModelFields:
    """Returns `llama_fields` of a model with layer norms, whose epsilon has this key."""
    eps = keys.number(key, 1e-5)
    return {**llama_fields(keys, rope, tied), "norm": "layer", "norm_eps": eps}


def model(
    keys: Keys,
    rope: Rope,
    mixers: Mixer | Sequence[Mixer],
    ffns: FeedForward | Sequence[FeedForward] | None = None,
    tied: bool = False,
    eps: float = 1e-6,
) -> ModelFields:
    """Returns `llama_fields` with the pattern of these layers; `ffns` None: `gated` ones."""
    layers = pattern(mixers, gated(keys) if ffns is None else ffns)
    return {**llama_fields(keys, rope, tied, eps), "pattern": layers}


def attention(keys: Keys, head_width: int | None = None, **fields: Any) -> Attention:
    """Returns attention with the heads and biases that all of Llama's relatives write.

    Args:
        head_width: where the file states none; None: by the model's width.
        fields: further fields, which win.
    """
    num_heads = keys.integer("num_attention_heads")
    width = head_width or max(keys.integer("hidden_size") // num_heads, 1)
    has_bias = keys.boolean("attention_bias", False)  # of all four projections
    defaults = {
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_width": keys.integer("head_dim", width),
        "biases": ("qkv", "out") if has_bias else (),
    }
    return Attention(**defaults | fields)


def gated(keys: Keys) -> Gated:
    """Returns the feed-forward of all of Llama's relatives; `mlp_bias` means all projections."""
    width, has_bias = keys.integer("intermediate_size"), keys.boolean("mlp_bias", False)
    return Gated(width, activation(keys), has_bias)


def activation(keys: Keys) -> str:
    """Returns the activation, which is SiLU in all of Llama's relatives."""
    return keys.choice("hidden_act", {"silu": "silu"}, "silu")


_PLAIN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "silu": "silu", "relu2": "relu2",
}  # fmt: skip


def plain(
    keys: Keys, activation: str, has_bias: bool, key: str = "hidden_act", width: int | None = None
) -> Plain:
    """Returns a plain feed-forward.

    Args:
        activation: where the file states none under `key`.
        width: where the file states none.
    """
    width = keys.integer("intermediate_size", width)
    return Plain(width, keys.choice(key, _PLAIN, activation), has_bias)


def upper_windows(keys: Keys, full: Attention) -> list[Attention]:
    """Returns the mixers by Qwen's rule: layers from `max_window_layers` on have a window."""
    first = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    repeated = types(layer >= first for layer in range(num_layers(keys)))
    sliding = dataclasses.replace(full, window=used_window(keys))
    return by_type(keys, full, sliding, repeated)


def used_window(keys: Keys) -> int | None:
    """Returns the window of Qwen's files, where they use one."""
    is_used = keys.boolean("use_sliding_window", False)
    return keys.optional_integer("sliding_window", 4096) if is_used else None


def num_layers(keys: Keys) -> int:
    """Returns how many layers a configuration states."""
    return keys.integer("num_hidden_layers", limit=MOST_LAYERS)


def types(slides: Iterable[bool]) -> list[str]:
    """Returns the names of kinds of layers, as `layer_types` lists them."""
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def numbered(keys: Keys, key: str, layers: int) -> set[int]:
    """Returns the layers that a key lists by their numbers, from 0 on."""
    listed = keys.raw.get(key) or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise InputError(f"{keys.label}{key} lists numbers of layers, not {shown(listed)}")
    if unknown := [layer for layer in listed if not 0 <= layer < layers]:
        raise InputError(
            f"{keys.label}{key} names layer {unknown[0]} of {layers}; valid: 0 to {layers - 1}"
        )
    return set(listed)


def by_type(
    keys: Keys, full: Attention, sliding: Attention, repeated: Sequence[str]
) -> list[Attention]:
    """Returns each layer's attention by `layer_types`, else by kinds that repeat."""
    mixers = {"full_attention": full, "sliding_attention": sliding}
    kinds = layer_types(keys, mixers)
    kinds = kinds or [repeated[n % len(repeated)] for n in range(num_layers(keys))]
    return [mixers[kind] for kind in kinds]


def layer_types(keys: Keys, valid: Iterable[str]) -> list[str] | None:
    """Returns the kinds in `layer_types`, if any; raises an `InputError` if one is not `valid`."""
    listed = keys.listed("layer_types", num_layers(keys))
    kinds = []
    for kind in listed or ():
        if not isinstance(kind, str) or kind not in valid:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(valid)}"
            )
        kinds.append(kind)
    return None if listed is None else kinds


def pattern(
    mixers: Mixer | Sequence[Mixer],
    ffns: FeedForward | Sequence[FeedForward | None],
    parallel_norms: int = 0,
) -> Pattern:
    """Returns the pattern that repeats. One mixer, or one feed-forward, is that of all layers."""
    if isinstance(mixers, Mixer):
        mixers = [mixers] * (1 if isinstance(ffns, FeedForward) else len(ffns))
    if isinstance(ffns, FeedForward):
        ffns = [ffns] * len(mixers)
    pairs = zip(mixers, ffns, strict=True)
    return repeated([LayerSpec(*pair, parallel_norms=parallel_norms) for pair in pairs])


def repeated(layers: Sequence[LayerSpec]) -> Pattern:
    """Returns the pattern that repeats, by its longest border (Knuth, Morris & Pratt 1977): a file
    may list thousands of layers.
    """
    borders = [0]
    for layer in layers[1:]:
        border = borders[-1]
        while border and layer != layers[border]:
            border = borders[border - 1]
        borders.append(border + (layer == layers[border]))
    return tuple(layers[: len(layers) - borders[-1]])
