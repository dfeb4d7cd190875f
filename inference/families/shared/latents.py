"""Reads and writes latent attention as DeepSeek's relatives have it in `config.json`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from configs.kinds.experts import Experts
from configs.kinds.kind import FeedForward
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Yarn
from configs.kinds.temperature import Temperature
from configs.model import ModelConfig
from inference.families.shared import export_fields, fields, mixtures, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.fields import ModelFields


def model(
    keys: Keys, experts: Experts | None, is_neighbours: bool, first_dense: int,
    ffns: Sequence[FeedForward] | None = None, indexer: Indexer | None = None,
    temperature: Temperature | None = None,
) -> ModelFields:  # fmt: skip
    """Returns the fields of a model of latent attention.

    Args:
        experts: the mixture of layers behind the `first_dense` ones; None: `ffns` has all.
        is_neighbours: rotary pairs are stored as neighbors.
        first_dense: where the file does not state it.
        ffns: of each layer; None: by `first_dense`.
        indexer: chooses the tokens; None: layers attend to all.
        temperature: of queries.
    """
    rope = dataclasses.replace(rope_keys.read(keys), neighbours=is_neighbours)
    stated = rope_keys.described(keys) or Keys({})
    nope, rotary = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64)
    scale = None
    if rope.scaling is not None and stated.raw.get("mscale_all_dim"):
        factor, sharper = stated.number("factor", 1.0), 1.0
        if factor > 1:
            sharper += 0.1 * stated.number("mscale_all_dim") * math.log(factor)
        scale = (nope + rotary) ** -0.5 * sharper**2
    num_heads = keys.integer("num_attention_heads")
    latent = attention(
        keys, num_heads, 1536, rope=rope, scale=scale, indexer=indexer, temperature=temperature
    )
    if ffns is None:
        assert experts is not None
        ffns = mixtures.after_dense(keys, experts, first_dense)
    return fields.model(keys, rope, latent, ffns)


def attention(keys: Keys, num_heads: int, query_rank: int | None, **fields: Any) -> Latent:
    """Returns latent attention; `query_rank` where the file states none."""
    return Latent(
        num_heads=num_heads,
        rank=keys.integer("kv_lora_rank", 512),
        rope_width=keys.integer("qk_rope_head_dim", 64),
        nope_width=keys.integer("qk_nope_head_dim", 128),
        value_width=keys.integer("v_head_dim", 128),
        query_rank=keys.optional_integer("q_lora_rank", query_rank),
        has_bias=keys.boolean("attention_bias", False),
        **fields,
    )


def indexer(keys: Keys, num_heads: int, is_neighbours: bool) -> Indexer:
    """Returns the indexer; `num_heads` where the file states none."""
    return Indexer(
        keys.integer("index_n_heads", num_heads),
        keys.integer("index_head_dim", 128),
        keys.integer("index_topk", 2048),
        is_neighbours,
    )


def indexed_model(keys: Keys, indexer: Indexer, num_groups: int, top_groups: int) -> ModelFields:
    """Returns the fields of latent attention over chosen tokens, with DeepSeek-V3's mixture."""
    router = mixtures.offset_router(keys, 2.5, num_groups, top_groups)
    experts = mixtures.sharing_experts(keys, 256, 8, router, width=2048)
    return model(
        keys, experts, is_neighbours=True, first_dense=3,
        ffns=mixtures.by_mlp_types(keys, experts), indexer=indexer,
    )  # fmt: skip


def written(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of a model of latent attention and mixtures."""
    latent = config.mixers(Latent)[0]
    raw = export_fields.sizes(config, latent.rope) | mixtures.routed(config)
    if isinstance(latent.rope.scaling, Yarn):
        scaling = export_fields.rope_scaling(latent.rope.scaling) or {}
        raw["rope_scaling"] = scaling | _scales(latent, latent.rope.scaling)
    return raw | heads(latent) | {"moe_layer_freq": 1}


def heads(latent: Latent) -> dict[str, object]:
    """Returns the keys of latent attention's heads."""
    return {
        "num_attention_heads": latent.num_heads,
        "num_key_value_heads": latent.num_heads,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "attention_bias": latent.has_bias,
    }


def _scales(latent: Latent, scaling: Yarn) -> dict[str, float]:
    """Returns the keys that give the scale of the scores and the factor on cos and sin."""
    if latent.scale is None or scaling.factor <= 1:
        return {}
    unit = 0.1 * math.log(scaling.factor)
    sharper = math.sqrt(latent.scale * math.sqrt(latent.nope_width + latent.rope_width))
    raw = {"mscale_all_dim": round((sharper - 1) / unit, 6)}
    if scaling.attention_factor is not None:
        raw["mscale"] = round((scaling.attention_factor * sharper - 1) / unit, 6)
    return raw
