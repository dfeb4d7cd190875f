"""Ling and Ring 2.0 (Ling Team 2025, arXiv 2510.22115): Qwen3's attention with partial RoPE,
DeepSeek-V3's mixture, without the layers that predict a second token.
"""

import dataclasses

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import YARN, GgufKeys


def _read_bailing_v2(keys: Keys) -> ModelFields:
    keys.require_neutral(use_bias=(False, None), norm_head=(False, None))
    keys.choice("score_function", {"sigmoid": "sigmoid"}, "sigmoid")
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 1.0))
    attention = fields.attention(
        keys, rope=rope, qk_norm="head" if keys.boolean("use_qk_norm", True) else None,
        biases=("qkv",) if keys.boolean("use_qkv_bias", False) else (),
    )  # fmt: skip
    num_groups, top_groups = mixtures.groups(keys, 8, 4)
    router = Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", True),
        keys.number("routed_scaling_factor", 2.5),
        has_offsets=keys.boolean("moe_router_enable_expert_bias", True),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=2,
    )
    width = keys.integer("moe_intermediate_size")
    shared = width * keys.whole("num_shared_experts", 0)
    experts = mixtures.experts(
        keys, "num_experts", None, None, width, router,
        shared_width=shared and keys.integer("moe_shared_expert_intermediate_size", shared),
    )  # fmt: skip
    ffns = mixtures.after_dense(keys, experts, first_dense=0)
    return fields.model(keys, rope, attention, ffns)


def _write_bailing_v2(config: ModelConfig) -> dict[str, object]:
    attention, experts = mixtures.attention(config), mixtures.mixture(config)
    raw = mixtures.with_heads(config) | mixtures.routed(config)
    del raw["n_routed_experts"], raw["n_shared_experts"]
    return raw | {
        "num_experts": experts.num_experts,
        "num_shared_experts": int(experts.shared_width > 0),
        "moe_shared_expert_intermediate_size": experts.shared_width or experts.width,
        "moe_router_enable_expert_bias": experts.router.has_offsets,
        "score_function": "sigmoid",
        "partial_rotary_factor": (attention.rope or Rope()).share,
        "use_qk_norm": attention.qk_norm is not None,
        "use_qkv_bias": "qkv" in attention.biases,
        "use_bias": False,
    }


def _gguf_bailing_v2(keys: GgufKeys) -> ModelFields:
    """Reads Ling 2.0, except its last blocks, which predict a second token."""
    attention = keys.attention(
        dataclasses.replace(keys.rope(has_yarn=True), share=keys.rotary_share),
        qk_norm="head",
        biases=("qkv",) if keys.has_tensor("blk.0.attn_qkv.bias") else (),
    )
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    shared = keys.whole("expert_shared_feed_forward_length")
    pattern = gguf_mixtures.after_dense(keys, attention, router, extra)
    pattern = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, shared_width=shared))
        if isinstance(layer.ffn, Experts)
        else layer
        for layer in pattern
    )
    return {"num_layers": keys.num_layers - extra, "pattern": pattern}


_TENSORS: Table = {
    **hf_names.SHARED_EXPERTS,
    "embed/table": ("model.word_embeddings.weight",),
    "mixer/qkv": ("attention.query_key_value.weight",),
    "mixer/out": ("attention.dense.weight",),
    "mixer/q_norm": ("attention.query_layernorm.weight",),
    "mixer/k_norm": ("attention.key_layernorm.weight",),
    "ffn/router_offsets": ("mlp.gate.expert_bias",),
}
FAMILIES = (
    Family(
        name="bailing_moe_v2",
        architecture="BailingMoeV2ForCausalLM",
        read=_read_bailing_v2,
        write=_write_bailing_v2,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        predicting=hf_names.PREDICTING_FINAL,
        gguf=Gguf(
            {**gguf_names.EXPERTS, "mixer/qkv": ("attn_qkv.weight",)},
            readers={
                "bailingmoe2": GgufReader(
                    _gguf_bailing_v2,
                    (*gguf_mixtures.DENSE, *YARN, "nextn_predict_layers"),
                    free_widths=("rope.dimension_count",),
                )
            },
            writer=GgufWriter("bailingmoe2", gguf_rope.yarn_of),
        ),
    ),
)
