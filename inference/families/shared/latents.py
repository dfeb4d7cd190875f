"""Latent attention as DeepSeek's relatives write it in `config.json`, read and written."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from configs.kinds.experts import Experts
from configs.kinds.kind import FeedForward
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Yarn
from configs.model import ModelConfig
from inference.families.shared import (
    export_fields,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys


def model(
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
    ffns = ffns or mixtures.after_dense(keys, experts, first_dense)
    return mixtures.model(keys, name, family, rope, [latent], ffns)


def indexer(keys: Keys, num_heads: int, is_neighbours: bool) -> Indexer:
    return Indexer(
        keys.integer("index_n_heads", num_heads),
        keys.integer("index_head_dim", 128),
        keys.integer("index_topk", 2048),
        is_neighbours,
    )


def indexed_model(
    keys: Keys, name: str, family: str, indexer: Indexer, num_groups: int, top_groups: int
) -> ModelConfig:
    """Latent attention over chosen tokens before a mixture that is chosen as DeepSeek-V3's."""
    width, shared = keys.integer("moe_intermediate_size", 2048), keys.whole("n_shared_experts", 1)
    experts = mixtures.experts(
        keys, "n_routed_experts", 256, 8, width, mixtures.offset_router(keys, 2.5, num_groups, top_groups),
        shared_width=width * shared,
    )  # fmt: skip
    return model(
        keys, name, family, experts, is_neighbours=True, first_dense=3,
        ffns=mixtures.by_mlp_types(keys, experts), indexer=indexer,
    )  # fmt: skip


def written(config: ModelConfig) -> dict[str, Any]:
    own = config.mixers(Latent)[0]
    raw = export_fields.sizes(config, own.rope) | mixtures.routed(config)
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
