"""GLM-4.5 and 4.6 (Zeng et al. 2025, arXiv 2508.06471), GLM-4.7-Flash and GLM-5 (Z.ai 2026),
without the layers that predict a second token.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.families import deepseek
from inference.families.family import Family, Gguf, GgufReader, ModelFields
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    latents,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_WIDTHS = {"qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}  # of latent attention


def _read_glm4_moe(keys: Keys) -> ModelFields:
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    attention = fields.attention(
        keys, rope=rope, qk_norm="head" if keys.boolean("use_qk_norm", False) else None,
        biases=("qkv",) if keys.boolean("attention_bias", False) else (),
    )  # fmt: skip
    router = mixtures.offset_router(keys, 1.0, 1, 1)
    experts = mixtures.sharing_experts(keys, 128, 8, router, width=1408)
    ffns = mixtures.after_dense(keys, experts, first_dense=1)
    return fields.model(keys, rope, attention, ffns, eps=1e-5)


def _read_glm4_moe_lite(keys: Keys) -> ModelFields:
    """Reads GLM-4.7-Flash, which has DeepSeek-V3's attention and mixture."""
    for described in (keys, rope_keys.described(keys) or keys):
        described.require_neutral(partial_rotary_factor=(1, None))
    keys = keys.with_defaults(_WIDTHS | {"q_lora_rank": 768})
    router = mixtures.offset_router(keys, 1.8, 1, 1)
    experts = mixtures.sharing_experts(keys, 64, 4, router, width=1536)
    is_neighbours = keys.boolean("rope_interleave", True)
    return latents.model(keys, experts, is_neighbours, first_dense=1,
        ffns=mixtures.by_mlp_types(keys, experts),
    )  # fmt: skip


def _read_glm_moe_dsa(keys: Keys) -> ModelFields:
    """Reads GLM-5, which has DeepSeek-V3.2's parts, with the indexer's rotary pairs as neighbors.
    Every layer has an indexer: layers that reuse the choice of an earlier one are not supported.
    """
    step = keys.whole("index_topk_freq", 1, limit=MOST_LAYERS)
    listed = keys.listed("indexer_types", fields.num_layers(keys))
    kinds = listed or keys.raw.get("index_topk_pattern") or ()
    kinds = kinds if isinstance(kinds, list | tuple | str) else (kinds,)
    if step > 1 or any(kind not in ("full", "F") for kind in kinds):
        raise InputError(
            "indexer_types (or index_topk_freq, index_topk_pattern) names layers that read the "
            "tokens an earlier layer chose, which is not supported: each is 'full'"
        )
    keys = keys.with_defaults(_WIDTHS | {"q_lora_rank": 2048})
    indexer = latents.indexer(keys, num_heads=32, is_neighbours=True)
    return latents.indexed_model(keys, indexer, num_groups=1, top_groups=1)


def _write_glm4_moe(config: ModelConfig) -> dict[str, object]:
    attention = mixtures.attention(config)
    return mixtures.with_heads(config) | mixtures.routed(config) | {
        "partial_rotary_factor": (attention.rope or Rope()).share,
        "use_qk_norm": attention.qk_norm is not None,
        "attention_bias": "qkv" in attention.biases,
    }  # fmt: skip


def _write_glm4_moe_lite(config: ModelConfig) -> dict[str, object]:
    return latents.written(config) | {
        "rope_interleave": config.mixers(Latent)[0].rope.neighbours,
        "mlp_layer_types": mixtures.mlp_types(config),
    }


def _gguf_glm4_moe(keys: GgufKeys) -> ModelFields:
    """Reads GLM-4.5 and 4.6, except their last blocks, which predict a second token."""
    attention = keys.attention(
        dataclasses.replace(keys.rope(), share=keys.rotary_share),
        qk_norm="head" if keys.has_tensor("blk.0.attn_q_norm.weight") else None,
        biases=("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else (),
    )
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    pattern = gguf_mixtures.after_dense(keys, attention, router, extra)
    return {"num_layers": keys.num_layers - extra, "pattern": pattern}


FAMILIES = (
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        read=_read_glm4_moe,
        reads=("attention_bias",),
        write=_write_glm4_moe,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.SHARED_EXPERTS,
        predicting=hf_names.PREDICTING,
        gguf=Gguf(
            gguf_names.POST_NORMED,
            readers={
                "glm4moe": GgufReader(
                    _gguf_glm4_moe,
                    (*gguf_mixtures.DENSE, "nextn_predict_layers"),
                    free_widths=("rope.dimension_count",),
                )
            },
        ),
    ),
    Family(
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        read=_read_glm4_moe_lite,
        reads=("attention_bias",),
        write=_write_glm4_moe_lite,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.LATENT,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        listed=("mlp_layer_types",),
        gguf=Gguf(gguf_names.LATENT),
    ),
    Family(
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        read=_read_glm_moe_dsa,
        reads=("attention_bias",),
        write=deepseek.write_indexed,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.INDEXED,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        listed=("mlp_layer_types", "indexer_types"),
    ),
)
