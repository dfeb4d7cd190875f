"""Hunyuan 3 (Tencent 2026): Qwen3's attention, DeepSeek-V3's mixture, without the layers that
predict a second token.
"""

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.model import ModelConfig
from inference.families.family import Family, ModelFields, Table
from inference.families.shared import fields, hf_names, mixtures, rope_keys
from inference.families.shared.config_keys import Keys


def _read_hy_v3(keys: Keys) -> ModelFields:
    keys.require_neutral(
        mlp_bias=(False, None), route_norm=(True, None), qk_norm=(True, None),
        moe_router_use_sigmoid=(True, None), moe_router_enable_expert_bias=(True, None),
    )  # fmt: skip
    rope = rope_keys.read(keys, 11_158_840.0)
    attention = fields.attention(keys, 128, rope=rope, qk_norm="head")
    scale = keys.number("router_scaling_factor", 2.826)
    width = keys.integer("moe_intermediate_size", keys.integer("expert_hidden_dim", 1536))
    experts = mixtures.experts(
        keys, "num_experts", 192, 8, width, Router("sigmoid", scale=scale, has_offsets=True),
        shared_width=width * keys.whole("num_shared_experts", 1),
    )  # fmt: skip
    listed = mixtures.by_mlp_types(keys, experts)
    ffns = listed or mixtures.after_dense(keys, experts, first_dense=1)
    return fields.model(keys, rope, attention, ffns, eps=1e-5)


def _write_hy_v3(config: ModelConfig) -> dict[str, object]:
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    return mixtures.with_heads(config) | {
        "attention_bias": "out" in mixtures.attention(config).biases,
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "num_shared_experts": experts.shared_width // experts.width,
        "router_scaling_factor": experts.router.scale,
        "mlp_layer_types": mixtures.mlp_types(config),
    }


_HY_V3: Table = {
    **hf_names.SHARED_EXPERTS,
    "ffn/router": ("mlp.router.gate.weight",),
    "ffn/router_offsets": ("mlp.expert_bias",),
    "ffn/shared/gate_up": ("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
    "ffn/shared/down": ("mlp.shared_mlp.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="hy_v3",
        architecture="HYV3ForCausalLM",
        read=_read_hy_v3,
        reads=("attention_bias",),
        write=_write_hy_v3,
        feed_forwards=(Gated, Experts),
        tensors=_HY_V3,
        predicting=hf_names.PREDICTING_FINAL,
        listed=("mlp_layer_types",),
    ),
)
