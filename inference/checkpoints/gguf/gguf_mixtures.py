"""Architectures with experts, and with latent attention, from a `.gguf` file's metadata."""

import dataclasses
import math
from typing import Any

from configs.errors import InputError
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import Mixer
from configs.kinds.latent import Latent
from configs.kinds.rope import Rope, Yarn
from configs.model import MOST_LAYERS, LayerSpec
from inference.checkpoints.gguf.gguf_keys import YARN, Keys

# Keys that these architectures read, beside those of all.
COUNTS = ("expert_count", "expert_used_count")
ROUTED = (
    *COUNTS,
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
)
_DENSE = (*ROUTED, "expert_shared_count", "leading_dense_block_count")
DOTS1 = _DENSE
GLM4 = (*_DENSE, "nextn_predict_layers")
LATENT = (
    *_DENSE,
    *YARN,
    "rope.scaling.yarn_log_multiplier",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
)

_SCORES = {1: "softmax", 2: "sigmoid"}


def mixtral(keys: Keys) -> dict[str, Any]:
    """A llama with experts, for which llama.cpp has no name of its own."""
    experts = read_experts(keys, Router(), width=keys.ffn_width)
    return {"family": "mixtral", "pattern": (LayerSpec(keys.attention(keys.rope()), experts),)}


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-57B-A14B."""
    shared = {
        "shared_width": keys.integer("expert_shared_feed_forward_length"),
        "has_shared_gate": True,
    }
    experts = read_experts(keys, read_router(keys, is_normalized=False), **shared)
    biases = ("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else ()
    attention = keys.attention(keys.rope(), biases=biases)
    return {"family": "qwen2_moe", "pattern": (LayerSpec(attention, experts),)}


def qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Qwen3-30B-A3B and its relatives."""
    experts = read_experts(keys, read_router(keys, is_normalized=True))
    attention = keys.attention(keys.rope(), qk_norm="head")
    return {"family": "qwen3_moe", "pattern": (LayerSpec(attention, experts),)}


def olmoe(keys: Keys) -> dict[str, Any]:
    """OLMoE."""
    width = keys.integer("expert_feed_forward_length", keys.ffn_width)
    experts = read_experts(keys, read_router(keys, is_normalized=False), width=width)
    attention = keys.attention(keys.rope(), qk_norm="all")
    return {"family": "olmoe", "pattern": (LayerSpec(attention, experts),)}


def deepseek(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V2, V3 and their relatives, which are told apart by how they route."""
    router = read_router(keys, is_normalized=False)
    family = "deepseek_v2" if router.scores == "softmax" else "deepseek_v3"
    return {"family": family, "pattern": _after_dense(keys, _latent(keys), router, 0)}


def glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM-4.5 and 4.6, whose last blocks predict a second token and are not read."""
    own = keys.head_width
    share = keys.integer("rope.dimension_count", own) / own
    attention = keys.attention(
        dataclasses.replace(keys.rope(), share=share),
        qk_norm="head" if keys.has_tensor("blk.0.attn_q_norm.weight") else None,
        biases=("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else (),
    )
    router = read_router(keys, is_normalized=True, scores="sigmoid")
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    pattern = _after_dense(keys, attention, router, extra)
    return {"family": "glm4_moe", "num_layers": keys.num_layers - extra, "pattern": pattern}


def dots1(keys: Keys) -> dict[str, Any]:
    """dots.llm1."""
    router = read_router(keys, is_normalized=False, scores="sigmoid")
    pattern = _after_dense(keys, keys.attention(keys.rope(), qk_norm="head"), router, 0)
    return {"family": "dots1", "pattern": pattern}


def minimax_m2(keys: Keys) -> dict[str, Any]:
    """MiniMax-M2."""
    own = keys.head_width
    rope = dataclasses.replace(keys.rope(), share=keys.integer("rope.dimension_count", own) / own)
    router = read_router(keys, is_normalized=True, scores="sigmoid")
    experts = read_experts(keys, dataclasses.replace(router, group_best=1))
    attention = keys.attention(rope, qk_norm="all")
    return {"family": "minimax_m2", "pattern": (LayerSpec(attention, experts),)}


def gpt_oss(keys: Keys) -> dict[str, Any]:
    """gpt-oss; llama.cpp knows its limit, its offset and its pattern, and rounds YaRN's ends, which
    the model itself does not.
    """
    rope = keys.rope(has_yarn=True)
    if isinstance(rope.scaling, Yarn):
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
    full = keys.attention(rope, biases=("qkv", "out"), has_sinks=True)
    sliding = dataclasses.replace(full, window=keys.integer("attention.sliding_window"))
    experts = read_experts(
        keys, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=7.0,
        up_offset=1.0,
    )  # fmt: skip
    pattern = (LayerSpec(sliding, experts), LayerSpec(full, experts))
    return {"family": "gpt_oss", "pattern": pattern}


def read_router(keys: Keys, is_normalized: bool, scores: str = "softmax") -> Router:
    """By the keys that state how, or as llama.cpp knows of the architecture; groups that are not
    stated are not there.
    """
    function = keys.whole("expert_gating_func")
    if function and function not in _SCORES:
        raise InputError(
            f"metadata {keys.family}.expert_gating_func={function} is not supported; "
            "valid: 1 (softmax), 2 (sigmoid)"
        )
    scores = _SCORES.get(function, scores)
    groups = max(keys.whole("expert_group_count"), 1)
    top_groups = max(keys.whole("expert_group_used_count"), 1) if groups > 1 else 1
    has_offsets = scores == "sigmoid"
    return Router(
        scores,
        keys.boolean("expert_weights_norm", is_normalized),
        keys.number("expert_weights_scale", 1.0),
        has_offsets=has_offsets,
        num_groups=groups,
        top_groups=top_groups,
        group_best=2 if has_offsets else 1,
    )


def read_experts(keys: Keys, router: Router, width: int | None = None, **own: Any) -> Experts:
    """So many experts of one width, that of the architecture's key unless it is given."""
    return Experts(
        keys.integer("expert_count"),
        keys.integer("expert_used_count"),
        width or keys.integer("expert_feed_forward_length"),
        router,
        **own,
    )


def _after_dense(keys: Keys, mixer: Mixer, router: Router, extra: int) -> tuple[LayerSpec, ...]:
    """Dense layers first, then the mixture; its shared experts are as wide as the others."""
    shared = keys.whole("expert_shared_count") * keys.integer("expert_feed_forward_length")
    mixture = LayerSpec(mixer, read_experts(keys, router, shared_width=shared))
    dense = keys.whole("leading_dense_block_count", limit=MOST_LAYERS)
    if not dense:
        return (mixture,)
    behind = max(keys.num_layers - extra - dense, 0)
    return (LayerSpec(mixer, Gated(keys.ffn_width)),) * dense + (mixture,) * behind


def _latent(keys: Keys) -> Latent:
    """Older files give the widths of a head where newer ones give those of the cache."""
    rotary = keys.integer("rope.dimension_count")
    newer = keys.has("attention.key_length_mla")
    key, value = (
        keys.integer(f"attention.{each}_length{'_mla' if newer else ''}")
        for each in ("key", "value")
    )
    if key <= rotary:
        raise InputError(f"metadata {keys.family}.rope.dimension_count={rotary} leaves no key")
    rope, scale = _scaled(keys, keys.rope(has_yarn=True), key)
    return Latent(
        num_heads=keys.integer("attention.head_count"),
        rank=keys.integer("attention.kv_lora_rank"),
        rope_width=rotary,
        nope_width=key - rotary,
        value_width=value,
        query_rank=keys.whole("attention.q_lora_rank") or None,
        rope=dataclasses.replace(rope, neighbours=True),
        scale=scale,
    )


def _scaled(keys: Keys, rope: Rope, key_width: int) -> tuple[Rope, float | None]:
    """DeepSeek's YaRN scales the scores instead of cos and sin: llama.cpp stores a tenth of
    `mscale_all_dim` and takes `mscale` for the same.
    """
    log_factor = "rope.scaling.yarn_log_multiplier"
    if not isinstance(rope.scaling, Yarn) or not keys.has(log_factor):
        return rope, None
    yarn = dataclasses.replace(rope.scaling, attention_factor=1.0)
    each = round(keys.number(log_factor) / 0.1, 6)
    sharper = 0.1 * each * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0
    return dataclasses.replace(rope, scaling=yarn), key_width**-0.5 * sharper**2
