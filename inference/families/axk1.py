"""A.X-K1 (SK Telecom 2026): DeepSeek-V3 with a norm behind each mixture."""

import dataclasses

from configs.errors import InputError
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.families import deepseek
from inference.families.family import Family, ModelFields
from inference.families.shared import hf_names, latents, mixtures, parts
from inference.families.shared.config_keys import Keys


def _read_axk1(keys: Keys) -> ModelFields:
    keys.require_neutral(moe_layer_freq=(1, None), ep_size=(1, None))
    if keys.optional_integer("q_lora_rank", 1536) is None:
        raise InputError("q_lora_rank is an integer: queries of A.X-K1 come from a latent")
    router = mixtures.offset_router(keys, 2.5, 8, 4)
    experts = mixtures.sharing_experts(keys, 192, 8, router, width=2048)
    experts = dataclasses.replace(experts, has_post_norm=True)
    is_neighbours = keys.boolean("rope_interleave", True)
    ffns = mixtures.by_mlp_types(keys, experts)
    return latents.model(keys, experts, is_neighbours, first_dense=1, ffns=ffns)


def _write_axk1(config: ModelConfig) -> dict[str, object]:
    raw = deepseek.write_deepseek_v3(config) | {"mlp_layer_types": mixtures.mlp_types(config)}
    del raw["first_k_dense_replace"]
    return raw


FAMILIES = (
    Family(
        name="axk1",
        architecture="AXK1ForCausalLM",
        read=_read_axk1,
        reads=("attention_bias",),
        write=_write_axk1,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors={**hf_names.LATENT, "ffn/post_norm": ("post_mlp_layernorm.weight",)},
        splits=(parts.latent_heads,),
    ),
)
