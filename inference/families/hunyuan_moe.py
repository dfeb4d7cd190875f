"""Hunyuan A13B (Tencent 2025): the attention of dense Hunyuan, experts and a shared one in all
layers; and Hunyuan 3 (2026): Qwen3's attention, DeepSeek-V3's mixture, without the layers that
predict a second token.
"""

from configs.errors import InputError, shown
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from inference.families import hunyuan
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_hunyuan_moe(keys: Keys) -> ModelFields:
    keys.require_neutral(
        use_qk_norm=(True, None), use_cla=(False, None), use_mixed_mlp_moe=(True, None),
        moe_layer_num_skipped=(0, None), norm_topk_prob=(True, None),
        routed_scaling_factor=(1, None),
    )  # fmt: skip
    keys = keys.with_defaults({"head_dim": keys.raw.get("attention_head_dim")})
    turning, width = hunyuan.rope(keys), keys.integer("intermediate_size")
    attention = fields.attention(keys, rope=turning, qk_norm="head", rotates_first=True)
    for key, valid in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if _by_layer(keys, key, valid) != [valid] * fields.num_layers(keys):
            raise InputError(f"{key}={shown(keys.raw[key])} is not supported; valid: {valid}")
    experts = [
        mixtures.experts(
            keys.updated({"num_experts_per_tok": top_k}), "num_experts", 1, None, width,
            shared_width=width,
        )
        for top_k in _by_layer(keys, "moe_topk", 1)
    ]  # fmt: skip
    return fields.model(keys, turning, [attention] * len(experts), experts, eps=1e-5)


def _by_layer(keys: Keys, key: str, default: int) -> list[int]:
    """Returns an integer from 1 for each layer; a file may state one for all."""
    count = fields.num_layers(keys)
    if not isinstance(keys.raw.get(key), list):
        return [keys.integer(key, default)] * count
    listed = keys.listed(key, count) or []
    return [Keys({key: value}, keys.label).integer(key) for value in listed]


def _write_hunyuan_moe(config: ModelConfig) -> dict[str, object]:
    attention, experts = mixtures.attention(config), mixtures.mixture(config)
    ffns = [layer.ffn for layer in config.layers]
    return mixtures.with_heads(config) | {
        "attention_bias": "out" in attention.biases,
        "intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "moe_topk": [ffn.top_k for ffn in ffns if isinstance(ffn, Experts)],
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": False,
    }


def _gguf_hunyuan_moe(keys: GgufKeys) -> ModelFields:
    shared = keys.whole("expert_shared_feed_forward_length")
    experts = gguf_mixtures.read_experts(keys, Router(), shared_width=shared)
    attention = keys.attention(keys.rope(), qk_norm="head", rotates_first=True)
    return {"pattern": (LayerSpec(attention, experts),)}


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


_SHARED: Table = {
    **hf_names.SHARED_EXPERTS,
    "ffn/shared/gate_up": ("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
    "ffn/shared/down": ("mlp.shared_mlp.down_proj.weight",),
}
_HY_V3: Table = {
    **_SHARED,
    "ffn/router": ("mlp.router.gate.weight",),
    "ffn/router_offsets": ("mlp.expert_bias",),
}
FAMILIES = (
    Family(
        name="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        read=_read_hunyuan_moe,
        reads=("attention_bias",),
        write=_write_hunyuan_moe,
        feed_forwards=(Experts,),
        tensors={**_SHARED, **hunyuan.NORMS, "ffn/router": ("mlp.gate.wg.weight",)},
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={
                "hunyuan-moe": GgufReader(
                    _gguf_hunyuan_moe, (*gguf_mixtures.ROUTED, "expert_shared_count")
                )
            },
            writer=GgufWriter("hunyuan-moe"),
        ),
    ),
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
