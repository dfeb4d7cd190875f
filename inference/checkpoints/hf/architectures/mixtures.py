"""Builders of the architectures with experts, and of those with latent attention."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.checkpoints.hf.architectures import fields, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

# Keys that are refused elsewhere, and read here.
LATENT = ("attention_bias", "auto_map")
GLM4 = ("attention_bias",)
QWEN3 = ("attention_bias", "num_local_experts")
GPT_OSS = (*QWEN3, "quantization_config")
MINIMAX = ("num_local_experts",)
_PLAIN = Router()


def mixtral(keys: Keys, name: str) -> ModelConfig:
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""
    rope = rope_keys.read(keys, 1_000_000.0)
    attention = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    experts = _experts(keys, "num_local_experts", 8, 2, keys.integer("intermediate_size"))
    return _model(keys, name, "mixtral", rope, [attention], experts, eps=1e-5)


def qwen2_moe(keys: Keys, name: str) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-57B-A14B (Qwen Team 2024, arXiv 2407.10671)."""
    rope = rope_keys.read(keys)
    biases = ("qkv",) if keys.boolean("qkv_bias", True) else ()
    full = fields.attention(keys, rope=rope, biases=biases)
    is_used = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window", 4096) if is_used else None
    first = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    own = fields.types(n % 2 == 0 and n < first and is_used for n in range(_num_layers(keys)))
    mixers = fields.by_type(keys, full, dataclasses.replace(full, window=window), own)
    shared = {
        "shared_width": keys.integer("shared_expert_intermediate_size", 5632),
        "has_shared_gate": True,
    }
    width = keys.integer("moe_intermediate_size", 1408)
    experts = _experts(keys, "num_experts", 60, 4, width, _norm(keys, False), **shared)
    return _model(keys, name, "qwen2_moe", rope, mixers, _some_dense(keys, experts))


def qwen3_moe(keys: Keys, name: str) -> ModelConfig:
    """Qwen3-30B-A3B and its relatives (Qwen Team 2025, arXiv 2505.09388)."""
    rope = rope_keys.read(keys)
    is_used = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window", 4096) if is_used else None
    attention = fields.attention(keys, rope=rope, qk_norm="head", window=window)
    width = keys.integer("moe_intermediate_size", 768)
    count = "num_experts" if keys.raw.get("num_local_experts") is None else "num_local_experts"
    experts = _experts(keys, count, 128, 8, width, _norm(keys, False))
    return _model(keys, name, "qwen3_moe", rope, [attention], _some_dense(keys, experts))


def qwen3_next_ffns(keys: Keys) -> FeedForward | list[FeedForward]:
    """Feed-forwards of Qwen3-Next (Qwen Team 2025): those of Qwen2-MoE, whose weights are
    normalized by default.
    """
    width = keys.integer("moe_intermediate_size", 512)
    experts = _experts(
        keys, "num_experts", 512, 10, width, _norm(keys, True), has_shared_gate=True,
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    return _some_dense(keys, experts)


def kimi_ffns(keys: Keys) -> list[FeedForward]:
    """Feed-forwards of Kimi Linear (Kimi Team 2025, arXiv 2510.26692): those of DeepSeek-V3."""
    width = keys.integer("moe_intermediate_size", 1024)
    experts = _experts(
        keys, "num_experts", 256, 8, width, _offset_router(keys, 2.446, 1, 1),
        shared_width=width * keys.integer("n_shared_experts", 1),
    )  # fmt: skip
    return _listed(keys, experts) or _after_dense(keys, experts, first_dense=1)


def olmoe(keys: Keys, name: str) -> ModelConfig:
    """OLMoE (Muennighoff et al. 2024, arXiv 2409.02060)."""
    rope = rope_keys.read(keys)
    limit = keys.optional_number("clip_qkv")
    attention = fields.attention(keys, rope=rope, qk_norm="all", input_limit=limit)
    width = keys.integer("intermediate_size", 2048)
    experts = _experts(keys, "num_experts", 64, 8, width, _norm(keys, False))
    return _model(keys, name, "olmoe", rope, [attention], experts, eps=1e-5)


def deepseek_v2(keys: Keys, name: str) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv 2405.04434)."""
    keys.require_neutral({"norm_topk_prob": (False, None), "moe_layer_freq": (1, None)})
    keys.choice("scoring_func", {"softmax": "softmax"}, "softmax")
    method = keys.choice(
        "topk_method", {m: m for m in ("greedy", "group_limited_greedy")}, "greedy"
    )
    groups = {} if method == "greedy" else _groups(keys)
    router = Router(is_normalized=False, scale=keys.number("routed_scaling_factor", 1.0), **groups)
    width, shared = keys.integer("moe_intermediate_size", 1407), keys.whole("n_shared_experts", 2)
    experts = _experts(
        keys, "n_routed_experts", 64, None, width, router, shared_width=width * shared
    )
    return _latent_model(keys, name, "deepseek_v2", experts, is_neighbours=True, first_dense=0)


def deepseek_v3(keys: Keys, name: str) -> ModelConfig:
    """DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437), without the layer that predicts a
    second token.
    """
    keys.require_neutral({"moe_layer_freq": (1, None), "ep_size": (1, None)})
    width, shared = keys.integer("moe_intermediate_size", 2048), keys.whole("n_shared_experts", 1)
    experts = _experts(
        keys, "n_routed_experts", 256, 8, width, _offset_router(keys, 2.5, 8, 4),
        shared_width=width * shared,
    )  # fmt: skip
    is_neighbours = keys.boolean("rope_interleave", True)
    return _latent_model(keys, name, "deepseek_v3", experts, is_neighbours, first_dense=3)


def deepseek_v32(keys: Keys, name: str) -> ModelConfig:
    """DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 over the tokens that an indexer chooses,
    without the layer that predicts a second token.
    """
    keys.require_neutral({"moe_layer_freq": (1, None), "ep_size": (1, None)})
    indexer = _indexer(keys, num_heads=64, is_neighbours=False)
    return _indexed_model(keys, name, "deepseek_v32", indexer, num_groups=8, top_groups=4)


def glm4_moe(keys: Keys, name: str) -> ModelConfig:
    """GLM-4.5 and 4.6 (Zeng et al. 2025, arXiv 2508.06471), without the layer that predicts a
    second token.
    """
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    attention = fields.attention(
        keys, rope=rope, qk_norm="head" if keys.boolean("use_qk_norm", False) else None,
        biases=("qkv",) if keys.boolean("attention_bias", False) else (),
    )  # fmt: skip
    width, shared = keys.integer("moe_intermediate_size", 1408), keys.whole("n_shared_experts", 1)
    experts = _experts(
        keys, "n_routed_experts", 128, 8, width, _offset_router(keys, 1.0, 1, 1),
        shared_width=width * shared,
    )  # fmt: skip
    ffns = _after_dense(keys, experts, first_dense=1)
    return _model(keys, name, "glm4_moe", rope, [attention], ffns, eps=1e-5)


def gpt_oss(keys: Keys, name: str) -> ModelConfig:
    """gpt-oss (OpenAI 2025, arXiv 2508.10925)."""
    keys.require_neutral({"swiglu_alpha": (1.702, None)})
    packed = keys.nested("quantization_config")
    if packed is not None:  # it is how the experts are stored
        packed.choice("quant_method", {"mxfp4": "mxfp4"}, "none")
    stretched = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    original = {"original_max_position_embeddings": 4096}
    own = rope_keys.described(keys) or Keys(stretched | original, "rope_parameters: ")
    rope = rope_keys.scaled(keys, own, keys.number("rope_theta", 150_000.0))
    biases = ("qkv", "out") if keys.boolean("attention_bias", True) else ()
    full = fields.attention(keys, 64, rope=rope, biases=biases, has_sinks=True)
    window = keys.optional_integer("sliding_window", 128)
    sliding = dataclasses.replace(full, window=window)
    mixers = fields.by_type(keys, full, sliding, fields.types((True, False)))
    experts = _experts(
        keys, "num_local_experts", 128, 4, keys.integer("intermediate_size", 2880),
        Router(has_bias=True), activation="quick_gelu", has_bias=True,
        limit=keys.number("swiglu_limit", 7.0), up_offset=1.0,
    )  # fmt: skip
    return _model(keys, name, "gpt_oss", rope, mixers, experts, eps=1e-5)


# --- relatives: the same parts in other combinations ----------------------------------------------


def dots1(keys: Keys, name: str) -> ModelConfig:
    """dots.llm1 (Huo et al. 2025, arXiv 2506.05767): Qwen3's attention, DeepSeek-V3's mixture."""
    keys.choice("scoring_func", {each: each for each in ("noaux_tc", "sigmoid")}, "sigmoid")
    keys = Keys(keys.raw | {"scoring_func": None}, keys.label)  # both names are sigmoid's
    rope = rope_keys.read(keys)
    full = fields.attention(keys, rope=rope, qk_norm="head")
    window = keys.optional_integer("sliding_window", 4096)
    first = keys.whole("max_window_layers", 62, limit=MOST_LAYERS)
    own = fields.types(window is not None and n >= first for n in range(_num_layers(keys)))
    mixers = fields.by_type(keys, full, dataclasses.replace(full, window=window), own)
    width = keys.integer("moe_intermediate_size", 1408)
    router = _offset_router(keys, 1.0, 1, 1, is_normalized=False)
    experts = _experts(
        keys, "n_routed_experts", None, None, width, router,
        shared_width=width * keys.integer("n_shared_experts"),
    )  # fmt: skip
    return _model(keys, name, "dots1", rope, mixers, _after_dense(keys, experts, first_dense=0))


def flex_olmo(keys: Keys, name: str) -> ModelConfig:
    """FlexOlmo (Shi et al. 2025, arXiv 2507.07024): OLMo 2's layers, OLMoE's mixture."""
    rope = rope_keys.read(keys, 500_000.0)
    attention = fields.attention(keys, rope=rope, qk_norm="all")
    width = keys.integer("intermediate_size", 11_008)
    experts = _experts(keys, "num_experts", 7, 5, width, _norm(keys, False))
    found = _model(keys, name, "flex_olmo", rope, [attention], experts)
    return dataclasses.replace(found, pre_norms=False, post_norms=True)


def glm4_moe_lite(keys: Keys, name: str) -> ModelConfig:
    """GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's attention and mixture, without the layer that
    predicts a second token.
    """
    for described in (keys, rope_keys.described(keys) or keys):
        described.require_neutral({"partial_rotary_factor": (1, None)})
    width, shared = keys.integer("moe_intermediate_size", 1536), keys.whole("n_shared_experts", 1)
    experts = _experts(
        keys, "n_routed_experts", 64, 4, width, _offset_router(keys, 1.8, 1, 1),
        shared_width=width * shared,
    )  # fmt: skip
    own = {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 768, "rms_norm_eps": 1e-5}
    is_neighbours = keys.boolean("rope_interleave", True)
    return _latent_model(
        Keys(own | keys.raw, keys.label), name, "glm4_moe_lite", experts, is_neighbours,
        first_dense=1, ffns=_listed(keys, experts),
    )  # fmt: skip


def glm_moe_dsa(keys: Keys, name: str) -> ModelConfig:
    """GLM-5 (Z.ai 2026): DeepSeek-V3.2's parts, the indexer's rotary pairs side by side, without
    the layer that predicts a second token. Every layer has an indexer: layers that read what an
    earlier one chose are not supported.
    """
    num_layers = _num_layers(keys)
    step = keys.whole("index_topk_freq", 1, limit=MOST_LAYERS)
    pattern = keys.raw.get("index_topk_pattern")
    own = keys.listed("indexer_types", num_layers) or pattern or ()
    if step > 1 or any(kind not in ("full", "F") for kind in own):
        raise InputError(
            "indexer_types (or index_topk_freq, index_topk_pattern) names layers that read the "
            "tokens an earlier layer chose, which is not supported: each is 'full'"
        )
    sizes = {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 2048, "rms_norm_eps": 1e-5}
    indexer = _indexer(keys, num_heads=32, is_neighbours=True)
    return _indexed_model(
        Keys(sizes | keys.raw, keys.label), name, "glm_moe_dsa", indexer, num_groups=1, top_groups=1
    )


def minimax_m2(keys: Keys, name: str) -> ModelConfig:
    """MiniMax-M2 (MiniMax 2025): OLMo 2's norms of all queries and keys, positions in a share of
    each head, a mixture that is chosen as DeepSeek-V3's.
    """
    keys.require_neutral(
        {
            "use_qk_norm": (True, None),
            "qk_norm_type": ("per_layer", None),
            "use_routing_bias": (True, None),
            "scoring_func": ("sigmoid", None),
            "shared_intermediate_size": (0, None),
        }
    )
    width = keys.integer("head_dim", 128)
    rotary = keys.integer("rotary_dim", width)
    share = keys.number("partial_rotary_factor", rotary / width)
    rope = rope_keys.partial(keys, 5_000_000.0, share)
    attention = fields.attention(keys, width, rope=rope, qk_norm="all")
    router = Router("sigmoid", has_offsets=True)
    ffn_width = keys.integer("intermediate_size", 1536)
    experts = _experts(keys, "num_local_experts", 256, 8, ffn_width, router)
    return _model(keys, name, "minimax_m2", rope, [attention], experts)


def minimax_ffn(keys: Keys) -> Experts:
    """The mixture of MiniMax-Text-01."""
    return _experts(keys, "num_local_experts", 8, 2, keys.integer("intermediate_size", 14_336))


# --- what they share ------------------------------------------------------------------------------


def _model(
    keys: Keys,
    name: str,
    family: str,
    rope: Rope,
    mixers: Sequence[Any],
    ffns: FeedForward | Sequence[FeedForward],
    eps: float = 1e-6,
) -> ModelConfig:
    """One mixer is that of all layers, and so is one feed-forward."""
    if len(mixers) == 1 and not isinstance(ffns, FeedForward):
        mixers = [*mixers] * len(ffns)
    return ModelConfig(
        **fields.llama_fields(keys, name, family, eps=eps),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(mixers, ffns),
    )


def _latent_model(
    keys: Keys, name: str, family: str, experts: Experts, is_neighbours: bool, first_dense: int,
    ffns: Sequence[FeedForward] | None = None, indexer: Indexer | None = None,
) -> ModelConfig:  # fmt: skip
    """Latent attention before a mixture, or in front of the feed-forwards that are given."""
    own = rope_keys.described(keys)
    rope = rope_keys.scaled(keys, own, keys.number("rope_theta", 10_000.0))
    rope = dataclasses.replace(rope, neighbours=is_neighbours)
    nope, rotary = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64)
    scale = None
    if rope.scaling is not None and own is not None and own.raw.get("mscale_all_dim"):
        factor = own.number("factor", 1.0)
        sharper = 0.1 * own.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0
        scale = (nope + rotary) ** -0.5 * sharper**2
    latent = Latent(
        num_heads=keys.integer("num_attention_heads"),
        rank=keys.integer("kv_lora_rank", 512),
        rope_width=rotary,
        nope_width=nope,
        value_width=keys.integer("v_head_dim", 128),
        query_rank=keys.optional_integer("q_lora_rank", 1536),
        rope=rope,
        scale=scale,
        indexer=indexer,
        has_bias=keys.boolean("attention_bias", False),
    )
    ffns = ffns or _after_dense(keys, experts, first_dense)
    return _model(keys, name, family, rope, [latent], ffns)


def _indexer(keys: Keys, num_heads: int, is_neighbours: bool) -> Indexer:
    return Indexer(
        keys.integer("index_n_heads", num_heads),
        keys.integer("index_head_dim", 128),
        keys.integer("index_topk", 2048),
        is_neighbours,
    )


def _indexed_model(
    keys: Keys, name: str, family: str, indexer: Indexer, num_groups: int, top_groups: int
) -> ModelConfig:
    """Latent attention over chosen tokens before a mixture that is chosen as DeepSeek-V3's."""
    width, shared = keys.integer("moe_intermediate_size", 2048), keys.whole("n_shared_experts", 1)
    experts = _experts(
        keys, "n_routed_experts", 256, 8, width, _offset_router(keys, 2.5, num_groups, top_groups),
        shared_width=width * shared,
    )  # fmt: skip
    return _latent_model(
        keys, name, family, experts, is_neighbours=True, first_dense=3,
        ffns=_listed(keys, experts), indexer=indexer,
    )  # fmt: skip


def _experts(
    keys: Keys,
    count: str,
    num_experts: int | None,
    top_k: int | None,
    width: int,
    router: Router = _PLAIN,
    **own: Any,
) -> Experts:
    """A mixture: the key that counts its experts, the family's defaults, and what else it has."""
    num_experts, top_k = (
        keys.integer(count, num_experts),
        keys.integer("num_experts_per_tok", top_k),
    )
    if top_k > num_experts:
        raise InputError(f"num_experts_per_tok={top_k} is more than {count}={num_experts}")
    if num_experts % router.num_groups:
        raise InputError(f"n_group={router.num_groups} does not divide {count}={num_experts}")
    return Experts(
        num_experts,
        top_k,
        width,
        router,
        **{"activation": keys.choice("hidden_act", {"silu": "silu"}, "silu")} | own,
    )


def _norm(keys: Keys, default: bool) -> Router:
    return Router(is_normalized=keys.boolean("norm_topk_prob", default))


def _groups(
    keys: Keys, num_groups: int | None = None, top_groups: int | None = None
) -> dict[str, Any]:
    count, chosen = keys.integer("n_group", num_groups), keys.integer("topk_group", top_groups)
    if chosen > count:
        raise InputError(f"topk_group={chosen} is more than n_group={count}")
    return {"num_groups": count, "top_groups": chosen}


def _offset_router(
    keys: Keys, scale: float, num_groups: int, top_groups: int, is_normalized: bool = True
) -> Router:
    """DeepSeek-V3's: sigmoid scores, learned offsets in the choice, groups by their best two."""
    keys.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    keys.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    return Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", is_normalized),
        keys.number("routed_scaling_factor", scale),
        has_offsets=True,
        group_best=2,
        **_groups(keys, num_groups, top_groups),
    )


def _num_layers(keys: Keys) -> int:
    return keys.integer("num_hidden_layers", limit=MOST_LAYERS)


def _after_dense(keys: Keys, experts: Experts, first_dense: int) -> list[FeedForward]:
    """Dense layers first, then the mixture."""
    dense = keys.whole("first_k_dense_replace", first_dense, limit=MOST_LAYERS)
    return _by_layer(keys, experts, lambda layer: layer >= dense)


def _listed(keys: Keys, experts: Experts) -> list[FeedForward] | None:
    """The kinds that are listed by layer; None: they are not."""
    kinds = keys.listed("mlp_layer_types", _num_layers(keys))
    if any(kind not in ("dense", "sparse") for kind in kinds or ()):
        raise InputError("mlp_layer_types lists 'dense' or 'sparse' for each layer")
    return kinds and _by_layer(keys, experts, lambda layer: kinds[layer] == "sparse")


def _some_dense(keys: Keys, experts: Experts) -> FeedForward | list[FeedForward]:
    """Qwen's rule: a mixture in every so many layers, but for those that are listed."""
    step = keys.integer("decoder_sparse_step", 1)
    listed = keys.raw.get("mlp_only_layers") or ()
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        raise InputError(f"mlp_only_layers lists numbers of layers, not {shown(listed)}")
    if step == 1 and not listed:
        return experts
    dense = frozenset(listed)
    return _by_layer(keys, experts, lambda layer: (layer + 1) % step == 0 and layer not in dense)


def _by_layer(keys: Keys, experts: Experts, is_mixture: Callable[[int], bool]) -> list[FeedForward]:
    dense = Gated(
        keys.integer("intermediate_size"), keys.choice("hidden_act", {"silu": "silu"}, "silu")
    )
    return [experts if is_mixture(layer) else dense for layer in range(_num_layers(keys))]
