"""MiMo-V2-Flash (Xiaomi 2026, arXiv 2601.02780): values narrower than keys, layers with windows
that have sinks and more heads of their own, GLM-4.5's mixture without a shared expert; without the
layers that predict further tokens.
"""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

_SHARE = 0.334
_ROPES = {
    "full_attention": Rope(5_000_000.0, share=_SHARE),
    "sliding_attention": Rope(10_000.0, share=_SHARE),
}


def _read_mimo_v2(keys: Keys) -> ModelFields:
    layers, width = fields.num_layers(keys), keys.integer("head_dim", 192)
    num_heads, value_width = keys.integer("num_attention_heads"), keys.integer("v_head_dim", 128)
    keys.require_neutral(
        swa_num_attention_heads=(num_heads, None), swa_head_dim=(width, None),
        swa_v_head_dim=(value_width, None), n_shared_experts=(0, None),
        add_swa_attention_sink_bias=(True, None), add_full_attention_sink_bias=(False, None),
    )  # fmt: skip
    full = fields.attention(
        keys, width, rope=_rope(keys, "full_attention", "rope_theta"),
        value_width=None if value_width == width else value_width,
        value_scale=keys.number("attention_value_scale", 1.0),
        biases=("qkv",) if keys.boolean("attention_bias", False) else (),
    )  # fmt: skip
    sliding = dataclasses.replace(
        full, rope=_rope(keys, "sliding_attention", "swa_rope_theta"), window=_window(keys),
        num_kv_heads=keys.integer("swa_num_key_value_heads", 2 * full.num_kv_heads), has_sinks=True,
    )  # fmt: skip
    pattern = _flags(keys, "hybrid_layer_pattern", layers)
    if pattern is None:
        pattern = [n != 0 and (n + 1) % 6 != 0 for n in range(layers)]
    mixers = fields.by_type(keys, full, sliding, fields.types(pattern))
    router = mixtures.offset_router(keys, 1.0, 1, 1)
    width = keys.integer("moe_intermediate_size", 2048)
    experts = mixtures.experts(keys, "n_routed_experts", 256, 8, width, router)
    ffns = mixtures.by_mlp_types(keys, experts)
    if ffns is None:
        sparse = _flags(keys, "moe_layer_freq", layers) or [n > 0 for n in range(layers)]
        ffns = mixtures.by_layer(keys, experts, lambda layer: sparse[layer])
    eps = keys.number("rms_norm_eps", keys.number("layernorm_epsilon", 1e-5))
    return {**fields.model(keys, full.rope or Rope(), mixers, ffns), "norm_eps": eps}


def _rope(keys: Keys, kind: str, key: str) -> Rope:
    """Returns the positions of a kind of layer, by transformers' object or by the published key."""
    objects = keys.nested("rope_parameters") or Keys({})
    share = keys.number("partial_rotary_factor", _SHARE)
    theta = keys.number(key, _ROPES[kind].theta)
    return rope_keys.partial_of(keys, objects.nested(kind), theta, share)


def _window(keys: Keys) -> int:
    """Returns the tokens that a query sees: the published key counts those before it."""
    if keys.raw.get("sliding_window_size") is not None:
        return keys.integer("sliding_window_size") + 1
    return keys.integer("sliding_window", 129)


def _flags(keys: Keys, key: str, layers: int) -> list[bool] | None:
    """Returns the numbers, 0 or 1, that a key lists for each layer; None: it is absent."""
    listed = keys.listed(key, layers)
    if listed is not None and any(value not in (0, 1) for value in listed):
        raise InputError(f"{key} lists 0 or 1 for each layer, not {shown(listed)}")
    return None if listed is None else [value == 1 for value in listed]


def _write_mimo_v2(config: ModelConfig) -> dict[str, object]:
    """Returns transformers' keys; raises an `InputError` if they have no place for the heads."""
    mixers = config.mixers(Attention)
    full = next((mixer for mixer in mixers if mixer.window is None), None)
    sliding = next((mixer for mixer in mixers if mixer.window is not None), None)
    if full is not None and sliding is not None and sliding.num_kv_heads != 2 * full.num_kv_heads:
        raise InputError(
            f"{config.name}: layers with a window have {sliding.num_kv_heads} KV heads, and "
            f"transformers gives them twice the {full.num_kv_heads} of the others"
        )
    attention: Attention = full or mixers[0]
    raw: dict[str, Any] = mixtures.with_heads(config) | mixtures.routed(config)
    for key in ("rope_theta", "rope_scaling", "n_shared_experts", "first_k_dense_replace"):
        del raw[key]
    kv_heads = attention.num_kv_heads if full else attention.num_kv_heads // 2
    return raw | export_fields.layer_types(config) | {
        "sliding_window": sliding.window if sliding else 129,
        "rope_parameters": export_fields.ropes_by_kind(config, **_ROPES),
        "num_key_value_heads": kv_heads,
        "attention_bias": "qkv" in attention.biases,
        "attention_value_scale": attention.value_scale,
        "v_head_dim": attention.value_width or attention.head_width,
        "mlp_layer_types": mixtures.mlp_types(config),
    }  # fmt: skip


_VALUE_SCALE, _EXTRA = "attention.value_scale", "nextn_predict_layers"


def _gguf_mimo2(keys: GgufKeys) -> ModelFields:
    """Reads MiMo-V2, except its last blocks, which predict further tokens."""
    count = keys.num_layers - keys.whole(_EXTRA, limit=keys.num_layers - 1)
    layers = zip(keys.kv_heads(), gguf_windows.slides(keys, count), strict=False)
    mixers = [_gguf_attention(keys, n, kv_heads, near) for n, (kv_heads, near) in enumerate(layers)]
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    experts = gguf_mixtures.read_experts(keys, router)
    ffns = [
        experts if keys.has_tensor(f"blk.{n}.ffn_gate_inp.weight") else Gated(keys.ffn_width)
        for n in range(count)
    ]
    return {"num_layers": count, "pattern": tuple(map(LayerSpec, mixers, ffns))}


def _gguf_attention(keys: GgufKeys, layer: int, kv_heads: int, is_near: bool) -> Attention:
    far = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    value_width = keys.integer("attention.value_length", keys.head_width)
    return Attention(
        keys.integer("attention.head_count"),
        kv_heads,
        keys.head_width,
        gguf_rope.near(keys, far.share) if is_near else far,
        value_width=None if value_width == keys.head_width else value_width,
        value_scale=keys.number(_VALUE_SCALE, 1.0),
        biases=("qkv",) if keys.has_tensor(f"blk.{layer}.attn_q.bias") else (),
        has_sinks=keys.has_tensor(f"blk.{layer}.attn_sinks.weight"),
        window=keys.integer(gguf_windows.WINDOW) if is_near else None,
    )


def _gguf_keys(config: ModelConfig) -> Metadata:
    mixers = [export_fields.attention(layer) for layer in config.layers]
    return {
        **(gguf_windows.written(config) | gguf_rope.near_of(config)),
        "attention.head_count_kv": [mixer.num_kv_heads for mixer in mixers],
        "attention.value_length": mixers[0].value_width or mixers[0].head_width,
        _VALUE_SCALE: mixers[0].value_scale,
    }


_TENSORS: Table = {
    **hf_names.SHARED_EXPERTS,
    "mixer/sinks": ("self_attn.attention_sink_bias",),
}
FAMILIES = (
    Family(
        name="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        read=_read_mimo_v2,
        reads=("attention_bias",),
        write=_write_mimo_v2,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        predictor="model.mtp.",
        gguf=Gguf(
            {**gguf_names.EXPERTS, "mixer/sinks": ("attn_sinks.weight",)},
            readers={
                "mimo2": GgufReader(
                    _gguf_mimo2,
                    (
                        *(*gguf_mixtures.ROUTED, *gguf_windows.KEYS, _VALUE_SCALE, _EXTRA),
                        gguf_rope.NEAR_THETA,
                    ),
                    free_widths=("attention.value_length", "rope.dimension_count"),
                )
            },
            writer=GgufWriter("mimo2", _gguf_keys),
        ),
    ),
)
