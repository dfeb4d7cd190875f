"""Mellum 2 (JetBrains 2026): Qwen3-MoE with windows, and Gemma 3's two kinds of positions."""

import dataclasses

from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import export_fields, fields, hf_names, mixtures, rope_keys
from inference.families.shared.config_keys import Keys

_ROPES = {"full_attention": Rope(500_000.0), "sliding_attention": Rope(10_000.0)}


def _read_mellum(keys: Keys) -> ModelFields:
    distant, near = rope_keys.by_kind(keys)
    far = rope_keys.scaled(keys, distant, _ROPES["full_attention"].theta)
    full = fields.attention(keys, 128, rope=far, qk_norm="head")
    close = rope_keys.scaled(keys, near, _ROPES["sliding_attention"].theta)
    window = keys.optional_integer("sliding_window", 1024)
    sliding = dataclasses.replace(full, rope=close, window=window)
    mixers = fields.by_type(keys, full, sliding, ["full_attention"])
    count = "num_experts" if keys.raw.get("num_local_experts") is None else "num_local_experts"
    width, router = keys.integer("moe_intermediate_size", 896), mixtures.softmax_router(keys, True)
    experts = mixtures.experts(keys, count, 64, 8, width, router)
    ffns = mixtures.by_mlp_types(keys, experts) or [experts] * len(mixers)
    return fields.model(keys, far, mixers, ffns)


def _write_mellum(config: ModelConfig) -> dict[str, object]:
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    raw = mixtures.with_heads(config) | export_fields.layer_types(config)
    del raw["rope_theta"], raw["rope_scaling"]
    return raw | {
        "rope_parameters": export_fields.ropes_by_kind(config, **_ROPES),
        "attention_bias": "out" in mixtures.attention(config).biases,
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "mlp_layer_types": mixtures.mlp_types(config),
    }


FAMILIES = (
    Family(
        name="mellum",
        architecture="MellumForCausalLM",
        read=_read_mellum,
        reads=("attention_bias", "num_local_experts"),
        write=_write_mellum,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.EXPERTS,
        predictor="mtp.",
    ),
)
