"""Mistral Large 3 (Mistral AI 2025) and Mistral 4 (2026): DeepSeek-V3's attention, with queries
that grow with their position, and a mixture by softmax.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.families import mistral
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    gguf_latents,
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

_SHARE = "partial_rotary_factor"
_SIZES = {
    "intermediate_size": 12_288,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
}
_ROPE = mistral.ROPE | {
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def _read_mistral4(keys: Keys) -> ModelFields:
    keys = _whole_rotary(keys.with_defaults(_SIZES))
    keys.require_neutral(
        moe_layer_freq=(1, None), topk_method=(None,), scoring_func=("softmax", None)
    )
    groups, top_groups = mixtures.groups(keys, 1, 1)
    router = Router(
        is_normalized=keys.boolean("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
        group_best=2,
    )
    experts = mixtures.sharing_experts(keys, 128, 4, router, width=2048)
    if experts.top_k > experts.num_experts // groups * top_groups:
        raise InputError(
            f"num_experts_per_tok={experts.top_k} is more than the experts of "
            f"topk_group={top_groups}, and which others count is undefined"
        )
    heated = mistral.temperature(rope_keys.described(keys) or Keys({}))
    is_paired = keys.boolean("rope_interleave", True)
    return latents.model(keys, experts, is_paired, first_dense=0, temperature=heated)


def _whole_rotary(keys: Keys) -> Keys:
    """Returns the keys without the share of a head that rotates, which its widths say, too."""
    stated = rope_keys.described(keys) or Keys(_ROPE, "rope_parameters: ")
    nope, rotary = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    share = stated.number(_SHARE, rotary / (nope + rotary))
    if int(share * (nope + rotary)) != rotary:
        raise InputError(
            f"{stated.label}{_SHARE}={share:g} does not give qk_rope_head_dim={rotary} of "
            f"{nope + rotary}; leave it out"
        )
    rope = rope_keys.without_share(stated).raw
    return keys.updated({_SHARE: None, "rope_scaling": None, "rope_parameters": rope})


def _write_mistral4(config: ModelConfig) -> dict[str, object]:
    latent = config.mixers(Latent)[0]
    raw = latents.written(config)
    rope = raw["rope_scaling"] or {"rope_type": "default"}
    assert isinstance(rope, dict)
    share = latent.rope_width / (latent.nope_width + latent.rope_width)
    rope = mistral.stated_temperature(latent.temperature, config.max_context) | rope
    rope |= {_SHARE: share}  # without which transformers turns all of a head
    return raw | {"rope_scaling": rope, "rope_interleave": latent.rope.neighbours}


def _gguf_mistral4(keys: GgufKeys) -> ModelFields:
    router = dataclasses.replace(gguf_mixtures.read_router(keys, is_normalized=False), group_best=2)
    return {"pattern": gguf_mixtures.after_dense(keys, gguf_latents.rotated(keys), router, 0)}


_TENSORS: Table = {
    **hf_names.LATENT,
    "ffn/experts/gate_up": ("mlp.experts.gate_up_proj",),
    "ffn/experts/down": ("mlp.experts.down_proj",),
}
# Of Mistral's own files.
_OWN_TENSORS: Table = {
    "embed/table": ("tok_embeddings.weight",),
    "final_norm": ("norm.weight",),
    "head/table": ("output.weight",),
    "mixer_norm": ("attention_norm.weight",),
    "mixer/q": ("attention.wq.weight",),
    "mixer/q_down": ("attention.wq_a.weight",),
    "mixer/q_norm": ("attention.q_a_norm.weight",),
    "mixer/q_up": ("attention.wq_b.weight",),
    "mixer/kv_down": ("attention.wkv_a_with_mqa.weight",),
    "mixer/kv_norm": ("attention.kv_a_norm.weight",),
    "mixer/k_up": ("attention.wkv_b.{}.key",),
    "mixer/v_up": ("attention.wkv_b.{}.value",),
    "mixer/out": ("attention.wo.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    "ffn/gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "ffn/down": ("feed_forward.w2.weight",),
    "ffn/router": ("gate.weight",),
    "ffn/experts/gate_up": ("experts.{}.w1.weight", "experts.{}.w3.weight"),
    "ffn/experts/down": ("experts.{}.w2.weight",),
    "ffn/shared/gate_up": ("shared_experts.w1.weight", "shared_experts.w3.weight"),
    "ffn/shared/down": ("shared_experts.w2.weight",),
}
FAMILIES = (
    Family(
        name="mistral4",
        architecture="Mistral4ForCausalLM",
        read=_read_mistral4,
        reads=("attention_bias",),
        write=_write_mistral4,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(parts.latent_heads,),
        wrapper=mistral.WRAPPER,
        ignored=mistral.IMAGES,
        gguf=Gguf(
            gguf_names.LATENT,
            readers={
                "mistral4": GgufReader(
                    _gguf_mistral4,
                    (*gguf_mixtures.DENSE, *gguf_latents.ROTATED),
                    gguf_latents.FREE_WIDTHS,
                )
            },
            writer=GgufWriter("mistral4"),
        ),
    ),
    Family(
        name="mistral_large3",
        architecture="MistralLarge3ForCausalLM",
        read=_read_mistral4,
        reads=("attention_bias",),
        write=_write_mistral4,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=_OWN_TENSORS,
        layers="layers",
        splits=(parts.latent_heads,),
        ignored=(
            *("vision_encoder", "vision_language_adapter", "patch_merger"),
            "pre_mm_projector_norm",
        ),
    ),
)
