"""Architectures with Mamba-2 layers beside attention, and their `config.json`."""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.checkpoints.hf.architectures import export_fields, fields, recurrent, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

# Keys that are refused elsewhere, and read here.
BAMBA = ("attention_bias", "mlp_bias", "partial_rotary_factor")

_BAMBA = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}  # fmt: skip


def bamba(keys: Keys, name: str) -> ModelConfig:
    """Bamba (IBM, Princeton & UIUC 2024): attention in the layers that are listed."""
    keys = with_defaults(keys, _BAMBA)
    keys.require_neutral({"partial_rotary_factor": (0.5, None)})  # else beside the positions' base
    rope = _half_rope(keys)
    mixers = fields.attention(keys, rope=rope), mamba2(keys, expanded(keys))
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    attends = _listed_layers(keys, "attn_layer_indices", layers)
    return ModelConfig(
        **fields.llama_fields(keys, name, "bamba", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(
            [mixers[layer not in attends] for layer in range(layers)], fields.gated(keys)
        ),
    )


def with_defaults(keys: Keys, defaults: dict[str, Any]) -> Keys:
    """The keys, and those that files leave out as their class has them."""
    return Keys(defaults | keys.raw, keys.label)


def expanded(keys: Keys) -> int:
    """Elements of all heads, as a multiple of the model's width."""
    return int(keys.number("mamba_expand", 2) * keys.integer("hidden_size"))


def mamba2(keys: Keys, inner: int, **own: Any) -> Mamba2:
    """The state-space layer as Bamba and those behind it write it.

    Args:
        keys: of the whole model.
        inner: elements of all heads.
        own: fields that a family adds.
    """
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    is_auto = keys.raw.get("mamba_d_head") in ("auto", None)
    head_width = max(inner // heads, 1) if is_auto else keys.integer("mamba_d_head")
    if heads * head_width != inner:
        raise InputError(
            f"mamba_n_heads x mamba_d_head is {heads * head_width}, and the layer's width {inner}: "
            "they have to be equal"
        )
    told: dict[str, Any] = {
        "biases": recurrent.biases(keys, "mamba_proj_bias", "mamba_conv_bias"),
        "norm_width": inner // groups,
        "step_limits": recurrent.step_limits(keys),
    }
    state, conv = keys.integer("mamba_d_state", 256), keys.integer("mamba_d_conv", 4)
    return Mamba2(heads, head_width, state, groups, conv, **told | own)


def _half_rope(keys: Keys) -> Rope:
    """A share of each head rotates: half of it, unless the positions' own object says another."""
    own, share = rope_keys.described(keys), 0.5
    if own is not None:
        share = own.number("partial_rotary_factor", share)
        own = Keys(own.raw | {"partial_rotary_factor": None}, own.label)
    rope = rope_keys.scaled(keys, own, keys.number("rope_theta", 10_000.0))
    return dataclasses.replace(rope, share=share)


def _listed_layers(keys: Keys, key: str, layers: int) -> set[int]:
    listed = keys.raw.get(key) or []
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise InputError(f"{key} lists numbers of layers, not {shown(listed)}")
    if unknown := [each for each in listed if not 0 <= each < layers]:
        raise InputError(f"{key} names layer {unknown[0]} of {layers}")
    return set(listed)


def export_bamba(config: ModelConfig) -> dict[str, Any]:
    """See `bamba`. Both spellings of positions: the older one has no place for another share."""
    attends = [n for n, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)]
    raw = _hybrid(config) | {"attn_layer_indices": attends}
    rope = next((mixer.rope for mixer in config.mixers(Attention)), None) or Rope(share=0.5)
    own = export_fields.rope_scaling(rope.scaling) or {"rope_type": "default"}
    own |= {"rope_theta": rope.theta, "partial_rotary_factor": rope.share}
    return raw | {"rope_scaling": None, "rope_parameters": own}


def _hybrid(config: ModelConfig) -> dict[str, Any]:
    """What all of these families write alike, of layers of the first of each kind."""
    own = next(iter(config.mixers(Attention)), Attention(1, 1, config.width))
    ffn = config.layers[0].ffn
    raw = export_fields.sizes(config, own.rope or Rope()) | export_fields.heads(own)
    if isinstance(ffn, Gated):
        raw |= {"intermediate_size": ffn.width, "mlp_bias": ffn.has_bias}
    return raw | {"attention_bias": "out" in own.biases} | export_mamba2(config)


def export_mamba2(config: ModelConfig) -> dict[str, Any]:
    """See `mamba2`."""
    mixers: list[Mamba2] = config.mixers(Mamba2)
    mixer = next(iter(mixers), Mamba2(1, 2 * config.width, 1))
    return {
        "mamba_expand": recurrent.expansion(mixer, config.width),
        "mamba_n_heads": mixer.num_heads,
        "mamba_d_head": mixer.head_width,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_state": mixer.state_width,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": "conv" in mixer.biases,
        "mamba_proj_bias": "in" in mixer.biases,
        "time_step_limit": recurrent.limits_as_json(mixer),
    }
