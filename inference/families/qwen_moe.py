"""Qwen's mixtures: Qwen1.5-MoE and Qwen2-57B-A14B (Qwen Team 2024, arXiv 2407.10671), and
Qwen3-30B-A3B and its relatives (2025, arXiv 2505.09388), which Qwen3-VL's text is one of.
"""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_qwen2_moe(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    biases = ("qkv",) if keys.boolean("qkv_bias", True) else ()
    full = fields.attention(keys, rope=rope, biases=biases)
    sliding = dataclasses.replace(full, window=fields.used_window(keys))
    first = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    kinds = fields.types(n % 2 == 0 and n < first for n in range(fields.num_layers(keys)))
    mixers = fields.by_type(keys, full, sliding, kinds)
    experts = mixtures.experts(
        keys, "num_experts", 60, 4, keys.integer("moe_intermediate_size", 1408),
        mixtures.softmax_router(keys, False), has_shared_gate=True,
        shared_width=keys.integer("shared_expert_intermediate_size", 5632),
    )  # fmt: skip
    return fields.model(keys, rope, mixers, some_dense(keys, experts))


def _read_qwen3_moe(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    window = fields.used_window(keys)
    attention = fields.attention(keys, rope=rope, qk_norm="head", window=window)
    width = keys.integer("moe_intermediate_size", 768)
    count = "num_experts" if keys.raw.get("num_local_experts") is None else "num_local_experts"
    experts = mixtures.experts(keys, count, 128, 8, width, mixtures.softmax_router(keys, False))
    return fields.model(keys, rope, attention, some_dense(keys, experts))


def some_dense(keys: Keys, experts: Experts) -> FeedForward | list[FeedForward]:
    """Returns feed-forwards: the mixture in every so many layers, except listed ones."""
    step = keys.integer("decoder_sparse_step", 1)
    listed = keys.raw.get("mlp_only_layers") or ()
    if not isinstance(listed, list | tuple) or not all(type(layer) is int for layer in listed):
        raise InputError(f"mlp_only_layers lists numbers of layers, not {shown(listed)}")
    if step == 1 and not listed:
        return experts
    dense = frozenset(listed)
    return mixtures.by_layer(
        keys, experts, lambda layer: (layer + 1) % step == 0 and layer not in dense
    )


def _write_qwen2_moe(config: ModelConfig) -> dict[str, object]:
    kinds = export_fields.layer_types(config)
    return write_mixture(config) | kinds | {
        "use_sliding_window": kinds["sliding_window"] is not None,
        "qkv_bias": "qkv" in mixtures.attention(config).biases,
        "shared_expert_intermediate_size": mixtures.mixture(config).shared_width,
    }  # fmt: skip


def _write_qwen3_moe(config: ModelConfig) -> dict[str, object]:
    attention = mixtures.attention(config)
    return write_mixture(config) | {
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
        "attention_bias": "out" in attention.biases,
    }


def write_mixture(config: ModelConfig) -> dict[str, object]:
    """Returns the keys that Qwen's mixtures share."""
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    width = {"intermediate_size": dense[min(dense)].width} if dense else {}
    return mixtures.with_heads(config) | width | {
        "moe_intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }  # fmt: skip


def _gguf_qwen2_moe(keys: GgufKeys) -> ModelFields:
    experts = gguf_mixtures.read_experts(
        keys, gguf_mixtures.read_router(keys, is_normalized=False), has_shared_gate=True,
        shared_width=keys.integer("expert_shared_feed_forward_length"),
    )  # fmt: skip
    biases = ("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else ()
    return {"pattern": (LayerSpec(keys.attention(keys.rope(), biases=biases), experts),)}


def _gguf_qwen3_moe(keys: GgufKeys) -> ModelFields:
    experts = gguf_mixtures.read_experts(keys, gguf_mixtures.read_router(keys, is_normalized=True))
    return {"pattern": (LayerSpec(keys.attention(keys.rope(), qk_norm="head"), experts),)}


SHARED_EXPERT: Table = {
    **hf_names.EXPERTS,
    "ffn/shared/gate_up": tuple(f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up")),
    "ffn/shared/down": ("mlp.shared_expert.down_proj.weight",),
    "ffn/shared_gate": ("mlp.shared_expert_gate.weight",),
}
# The experts of a layer in one tensor: of Qwen3-VL [E, in, out], of Qwen3.5 [E, out, in]. In FP8
# each has its own.
STACKS: Table = {
    "mlp.experts.gate_up_proj": tuple(f"mlp.experts.{{}}.{p}_proj.weight" for p in ("gate", "up")),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        read=_read_qwen2_moe,
        write=_write_qwen2_moe,
        feed_forwards=(Gated, Experts),
        tensors=SHARED_EXPERT,
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={"qwen2moe": GgufReader(_gguf_qwen2_moe, gguf_mixtures.ROUTED)},
            writer=GgufWriter("qwen2moe"),
        ),
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        read=_read_qwen3_moe,
        reads=("attention_bias", "num_local_experts"),
        write=_write_qwen3_moe,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.EXPERTS,
        stacks=STACKS,
        wrapper="Qwen3VLMoeForConditionalGeneration",
        text_keys={"norm_topk_prob": True},
        ignored=("model.visual",),
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={"qwen3moe": GgufReader(_gguf_qwen3_moe, gguf_mixtures.ROUTED)},
            writer=GgufWriter("qwen3moe"),
        ),
    ),
)
