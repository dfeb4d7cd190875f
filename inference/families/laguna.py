"""Laguna (poolside 2026): attention with a gate of each head, more heads in layers with windows,
two kinds of partial RoPE, DeepSeek-V3's mixture.
"""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, ModelFields, Table
from inference.families.shared import export_fields, fields, hf_names, mixtures, rope_keys
from inference.families.shared.config_keys import Keys

_ROPES = {"full_attention": Rope(500_000.0, share=0.5), "sliding_attention": Rope(10_000.0)}
_GATINGS = {"per-head": False, "per-element": True}


def _read_laguna(keys: Keys) -> ModelFields:
    keys.require_neutral(
        moe_router_logit_softcapping=(0, None), moe_apply_router_weight_on_input=(False, None),
        norm_topk_prob=(True, None), qkv_bias=(False, None),
    )  # fmt: skip
    objects = keys.nested("rope_parameters")
    ropes = {
        kind: rope_keys.partial_of(
            keys, objects and objects.nested(kind), default.theta,
            default.share if objects is None else 1.0,
        )
        for kind, default in _ROPES.items()
    }  # fmt: skip
    heads = fields.attention(
        keys, 128, qk_norm="head", head_gate="softplus", gates_elements=_gating(keys)
    )
    full = dataclasses.replace(heads, rope=ropes["full_attention"])
    window = keys.integer("sliding_window", 512)
    sliding = dataclasses.replace(heads, rope=ropes["sliding_attention"], window=window)
    mixers = fields.by_type(keys, full, sliding, ["full_attention"])
    counts = keys.listed("num_attention_heads_per_layer", len(mixers))
    if counts is not None:
        of_layers = [Keys({"num_attention_heads_per_layer": count}) for count in counts]
        mixers = [
            dataclasses.replace(
                mixer, num_heads=layer_keys.integer("num_attention_heads_per_layer")
            )
            for mixer, layer_keys in zip(mixers, of_layers, strict=True)
        ]
    width = keys.integer("moe_intermediate_size", 512)
    scale = keys.number("moe_routed_scaling_factor", 1.0)
    experts = mixtures.experts(
        keys, "num_experts", 256, 8, width, Router("sigmoid", scale=scale, has_offsets=True),
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    listed = mixtures.by_mlp_types(keys, experts)
    ffns = listed or mixtures.by_layer(keys, experts, lambda layer: layer > 0)
    return fields.model(keys, ropes["full_attention"], mixers, ffns)


def _gating(keys: Keys) -> bool:
    """Returns whether gates are of each element in place of each head."""
    stated = keys.raw.get("gating")
    if stated is None or stated is True:
        return False
    if not isinstance(stated, str) or stated not in _GATINGS:
        valid = ", ".join(("true", *_GATINGS))
        raise InputError(f"gating={shown(stated)} is not supported; valid: {valid}")
    return _GATINGS[stated]


def _write_laguna(config: ModelConfig) -> dict[str, object]:
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    attention = mixtures.attention(config)
    raw = mixtures.with_heads(config) | export_fields.layer_types(config)
    del raw["rope_theta"], raw["rope_scaling"]
    raw["sliding_window"] = raw["sliding_window"] or 512
    return raw | {
        "rope_parameters": export_fields.ropes_by_kind(config, **_ROPES),
        "attention_bias": "out" in attention.biases,
        "gating": "per-element" if attention.gates_elements else "per-head",
        "num_attention_heads_per_layer": [
            export_fields.attention(layer).num_heads for layer in config.layers
        ],
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_routed_scaling_factor": experts.router.scale,
        "mlp_layer_types": mixtures.mlp_types(config),
    }


_TENSORS: Table = {
    **hf_names.SHARED_EXPERTS,
    "mixer/gate": ("self_attn.g_proj.weight",),
    "ffn/router_offsets": ("mlp.experts.e_score_correction_bias",),
    "ffn/shared/gate_up": tuple(f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up")),
    "ffn/shared/down": ("mlp.shared_expert.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="laguna",
        architecture="LagunaForCausalLM",
        read=_read_laguna,
        reads=("attention_bias",),
        write=_write_laguna,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
    ),
)
