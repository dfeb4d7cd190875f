"""Reads latent attention from the metadata of a `.gguf` file."""

import dataclasses
import math
from typing import Any

from configs.errors import InputError
from configs.kinds.latent import Latent
from configs.kinds.rope import Rope, Yarn
from configs.model import ModelConfig
from inference.families.shared import gguf_rope
from inference.families.shared.gguf_keys import YARN, GgufKeys
from inference.families.shared.gguf_states import Metadata

_LOG_FACTOR = "rope.scaling.yarn_log_multiplier"
# Keys that architectures with latent attention read, in addition to those of all.
HEADS = tuple(
    f"attention.{key}"
    for key in ("q_lora_rank", "kv_lora_rank", "key_length_mla", "value_length_mla")
)
ROTATED = (*HEADS, *YARN, _LOG_FACTOR, gguf_rope.TEMPERATURE, gguf_rope.TEMPERATURE_LENGTH)
FREE_WIDTHS = "attention.value_length", "rope.dimension_count"


def rotated(keys: GgufKeys, **fields: Any) -> Latent:
    """Returns latent attention whose rotary pairs are neighbors, and `fields`; of Mistral's models
    with a temperature.
    """
    latent = attention(keys, **fields)
    rope, scale = _scaled(keys, keys.rope(has_yarn=True), latent.nope_width + latent.rope_width)
    return dataclasses.replace(
        latent,
        rope=dataclasses.replace(rope, neighbours=True),
        scale=scale,
        temperature=gguf_rope.temperature(keys, rope),
    )


def attention(keys: GgufKeys, **fields: Any) -> Latent:
    """Returns latent attention, and `fields`; older files have the widths of heads under other
    keys.
    """
    rotary = keys.integer("rope.dimension_count")
    ending = "_mla" if keys.has("attention.key_length_mla") else ""
    key = keys.integer(f"attention.key_length{ending}")
    value = keys.integer(f"attention.value_length{ending}")
    if key <= rotary:
        raise InputError(
            f"metadata {keys.architecture}.rope.dimension_count={rotary} leaves no key"
        )
    return Latent(
        num_heads=keys.integer("attention.head_count"),
        rank=keys.integer("attention.kv_lora_rank"),
        rope_width=rotary,
        nope_width=key - rotary,
        value_width=value,
        query_rank=keys.whole("attention.q_lora_rank") or None,
        **fields,
    )


def _scaled(keys: GgufKeys, rope: Rope, key_width: int) -> tuple[Rope, float | None]:
    """Returns YaRN and the scale of the scores, which DeepSeek scales instead of cos and sin:
    llama.cpp stores a tenth of `mscale_all_dim`, and assumes that `mscale` is the same.
    """
    if not isinstance(rope.scaling, Yarn) or not keys.has(_LOG_FACTOR):
        return rope, None
    yarn = dataclasses.replace(rope.scaling, attention_factor=1.0)
    mscale = round(keys.number(_LOG_FACTOR) / 0.1, 6)
    sharper = 0.1 * mscale * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0
    return dataclasses.replace(rope, scaling=yarn), key_width**-0.5 * sharper**2


def metadata(config: ModelConfig) -> Metadata:
    """Returns the keys of latent attention, the inverse of `rotated`: it has one key/value head."""
    latent = config.mixers(Latent)[0]
    key = latent.nope_width + latent.rope_width
    metadata: Metadata = {
        "attention.head_count": latent.num_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + latent.rope_width,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": latent.value_width,
        "attention.kv_lora_rank": latent.rank,
        "rope.dimension_count": latent.rope_width,
    }
    if latent.query_rank is not None:
        metadata["attention.q_lora_rank"] = latent.query_rank
    if latent.rope is None:
        return metadata
    metadata |= {"rope.freq_base": latent.rope.theta, **gguf_rope.yarn_keys(latent.rope)}
    yarn = latent.rope.scaling
    if latent.scale is not None and isinstance(yarn, Yarn) and yarn.factor > 1:
        sharper = math.sqrt(latent.scale * math.sqrt(key))
        metadata[_LOG_FACTOR] = round((sharper - 1) / math.log(yarn.factor), 7)
        metadata.pop(gguf_rope.YARN_ATTENTION_FACTOR, None)  # which goes without saying
    if latent.temperature is not None:
        metadata[gguf_rope.TEMPERATURE] = latent.temperature.scale
        metadata[gguf_rope.TEMPERATURE_LENGTH] = latent.temperature.length
    return metadata
