"""`config.json` of the architectures with experts, and of those with latent attention: the inverse
of `mixtures`.
"""

import math
from typing import Any

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope, Yarn
from configs.model import ModelConfig
from inference.checkpoints.hf.architectures import export_fields


def mixtral(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.mixtral`."""
    experts = mixture(config)
    return with_heads(config) | {
        "sliding_window": attention(config).window,
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.qwen2_moe`."""
    kinds = export_fields.layer_types(config)
    return qwen(config) | kinds | {
        "use_sliding_window": kinds["sliding_window"] is not None,
        "qkv_bias": "qkv" in attention(config).biases,
        "shared_expert_intermediate_size": mixture(config).shared_width,
    }  # fmt: skip


def qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.qwen3_moe`."""
    own = attention(config)
    return qwen(config) | {
        "use_sliding_window": own.window is not None,
        "sliding_window": own.window,
        "attention_bias": "out" in own.biases,
    }


def olmoe(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.olmoe`."""
    experts = mixture(config)
    return with_heads(config) | {
        "intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "attention_bias": "out" in attention(config).biases,
        "clip_qkv": attention(config).input_limit,
    }


def deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.deepseek_v2`."""
    grouped = mixture(config).router.num_groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _latent(config) | {"topk_method": method, "scoring_func": "softmax"}


def deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.deepseek_v3`."""
    latent = config.mixers(Latent)[0]
    return _latent(config) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": latent.rope.neighbours,
    }


def deepseek_v32(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.deepseek_v32` and `mixtures.glm_moe_dsa`."""
    indexer = config.mixers(Latent)[0].indexer or Indexer(1, 1, 1)
    return _latent(config) | {
        "mlp_layer_types": mlp_types(config),
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_width,
        "index_topk": indexer.top_k,
    }


def glm4_moe(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.glm4_moe`."""
    own = attention(config)
    return with_heads(config) | _routed(config) | {
        "partial_rotary_factor": (own.rope or Rope()).share,
        "use_qk_norm": own.qk_norm is not None,
        "attention_bias": "qkv" in own.biases,
    }  # fmt: skip


def dots1(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.dots1`."""
    kinds = export_fields.layer_types(config)
    return with_heads(config) | _routed(config) | kinds | {
        "attention_bias": "qkv" in attention(config).biases,
        "scoring_func": "noaux_tc",
    }  # fmt: skip


def flex_olmo(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.flex_olmo`."""
    return {key: value for key, value in olmoe(config).items() if key != "clip_qkv"}


def glm4_moe_lite(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.glm4_moe_lite`."""
    return _latent(config) | {
        "rope_interleave": config.mixers(Latent)[0].rope.neighbours,
        "mlp_layer_types": mlp_types(config),
    }


def minimax_m2(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.minimax_m2`."""
    own = attention(config)
    raw = {key: value for key, value in mixtral(config).items() if key != "sliding_window"}
    return raw | {
        "rotary_dim": (own.rope or Rope()).rotating(own.head_width),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def gpt_oss(config: ModelConfig) -> dict[str, Any]:
    """See `mixtures.gpt_oss`."""
    experts = mixture(config)
    raw = with_heads(config) | export_fields.layer_types(config) | {
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "attention_bias": "qkv" in attention(config).biases,
        "swiglu_limit": experts.limit,
    }  # fmt: skip
    raw["rope_scaling"] = raw["rope_scaling"] or {"rope_type": "default"}  # left out, it is yarn
    return raw if raw["sliding_window"] else raw | {"sliding_window": 128}


def attention(config: ModelConfig) -> Attention:
    """The first that attends; where other mixers stand in its place, there is none to write."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, 2))


def mixture(config: ModelConfig) -> Experts:
    """The first mixture; a model of dense layers has none to write."""
    found = (layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts))
    return next(found, Experts(1, 1, 1, Router()))


def with_heads(config: ModelConfig) -> dict[str, Any]:
    """Sizes of a model and of its heads."""
    own = attention(config)
    return export_fields.sizes(config, own.rope or Rope()) | export_fields.heads(own)


def _dense(config: ModelConfig) -> dict[int, Gated]:
    """Layers without a mixture."""
    return {n: layer.ffn for n, layer in enumerate(config.layers) if isinstance(layer.ffn, Gated)}


def mlp_types(config: ModelConfig) -> list[str]:
    """Which layers have a mixture."""
    dense = _dense(config)
    return ["dense" if n in dense else "sparse" for n in range(config.num_layers)]


def qwen(config: ModelConfig) -> dict[str, Any]:
    """What Qwen's mixtures write alike."""
    experts, dense = mixture(config), _dense(config)
    width = {"intermediate_size": dense[min(dense)].width} if dense else {}
    return with_heads(config) | width | {
        "moe_intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }  # fmt: skip


def _routed(config: ModelConfig) -> dict[str, Any]:
    """The mixture as DeepSeek's relatives write it, whose shared experts are as wide as others."""
    experts, dense = mixture(config), _dense(config)
    router = experts.router
    return {
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_width // experts.width,
        "num_experts_per_tok": experts.top_k,
        "n_group": router.num_groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.is_normalized,
        "routed_scaling_factor": router.scale,
        "first_k_dense_replace": len(dense),
    }


def _latent(config: ModelConfig) -> dict[str, Any]:
    own = config.mixers(Latent)[0]
    raw = export_fields.sizes(config, own.rope) | _routed(config)
    if isinstance(own.rope.scaling, Yarn):
        raw["rope_scaling"] |= _scales(own, own.rope.scaling)
    return raw | {
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_heads,
        "kv_lora_rank": own.rank,
        "q_lora_rank": own.query_rank,
        "qk_nope_head_dim": own.nope_width,
        "qk_rope_head_dim": own.rope_width,
        "v_head_dim": own.value_width,
        "attention_bias": own.has_bias,
        "moe_layer_freq": 1,
    }


def _scales(own: Latent, scaling: Yarn) -> dict[str, float]:
    """What the scale of the scores, and the factor on cos and sin, were made of."""
    if own.scale is None or scaling.factor <= 1:
        return {}
    each = 0.1 * math.log(scaling.factor)
    sharper = math.sqrt(own.scale * math.sqrt(own.nope_width + own.rope_width))
    raw = {"mscale_all_dim": round((sharper - 1) / each, 6)}
    if scaling.attention_factor is not None:
        raw["mscale"] = round((scaling.attention_factor * sharper - 1) / each, 6)
    return raw
