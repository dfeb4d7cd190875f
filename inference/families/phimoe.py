"""Phi-3.5-MoE (Abdin et al. 2024, arXiv 2404.14219) and Phi-mini-MoE (Li et al. 2025, arXiv
2506.18349): layer norms, and a mixture that is routed as GRIN was trained (arXiv 2409.12136).
"""

from configs.errors import InputError
from configs.kinds.experts import Experts, Router
from configs.kinds.rope import LongRope
from configs.model import LayerSpec, ModelConfig
from inference.families import mixtral, phi3
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_THETA = 1_000_000.0
_SCALES = "short_mscale", "long_mscale"
_CHOSEN, _NOISE = 2, 0.01  # experts of a token, and what scores were multiplied with in training


def _read_phimoe(keys: Keys) -> ModelFields:
    keys.require_neutral(num_experts_per_tok=(_CHOSEN, None))  # others choose so many, too
    stated = rope_keys.described(keys)
    if stated is not None and stated.raw.get("long_factor") is not None:
        stated = _scaled_once(stated)
    rope = rope_keys.scaled(keys, stated, keys.number("rope_theta", _THETA))
    attention = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    jitter = 2 * keys.number("router_jitter_noise", _NOISE)
    router = Router(is_normalized=False, jitter=jitter)
    width = keys.integer("intermediate_size", 6400)
    return {
        **fields.layer_normed(keys, rope, key="rms_norm_eps"),
        "pattern": fields.pattern(
            attention, mixtures.experts(keys, "num_local_experts", 16, _CHOSEN, width, router)
        ),
        "has_head_bias": keys.boolean("lm_head_bias", False),
    }


def _scaled_once(stated: Keys) -> Keys:
    """Returns the object of positions with its two factors of cos and sin, which must agree, as
    one.
    """
    short, long = (stated.number(key) for key in _SCALES)
    if short != long:
        raise InputError(
            f"{stated.label}long_mscale={long:g} differs from short_mscale={short:g}; both must "
            "agree, because cached keys are not rotated again where a text grows long"
        )
    return stated.updated({"attention_factor": short})


def _write_phimoe(config: ModelConfig) -> dict[str, object]:
    attention, router = mixtures.attention(config), mixtures.mixture(config).router
    raw = mixtral.write(config)
    scaling = attention.rope and attention.rope.scaling
    if isinstance(scaling, LongRope):
        stated = {
            "short_factor": list(scaling.short), "long_factor": list(scaling.long),
            "original_max_position_embeddings": scaling.original_context,
        }  # fmt: skip
        scales = dict.fromkeys(_SCALES, scaling.attention_factor)
        raw["rope_scaling"] = {"rope_type": "longrope"} | stated | scales
    return raw | {
        "attention_bias": "out" in attention.biases,
        "router_jitter_noise": (router.jitter or 2 * _NOISE) / 2,
        "lm_head_bias": config.has_head_bias,
    }


def _gguf_phimoe(keys: GgufKeys) -> ModelFields:
    """Reads Phi-3.5-MoE, which is routed as it was trained: llama.cpp has the softmax alone."""
    if (chosen := keys.integer("expert_used_count")) != _CHOSEN:
        raise InputError(
            f"metadata {keys.architecture}.expert_used_count must be {_CHOSEN}, not {chosen}"
        )
    attention = keys.attention(
        gguf_rope.longrope(keys),
        window=keys.whole(gguf_windows.WINDOW) or None,
        biases=("qkv", "out") if keys.has_tensor("blk.0.attn_q.bias") else (),
    )
    router = Router(is_normalized=False, jitter=2 * _NOISE)
    experts = gguf_mixtures.read_experts(keys, router, keys.ffn_width)
    return {
        "norm": "layer",
        "pattern": (LayerSpec(attention, experts),),
        "has_head_bias": keys.has_tensor("output.bias"),
    }


_TENSORS: Table = {
    **mixtral.TENSORS,
    "final_norm/weight": ("model.norm.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    "ffn_norm/weight": ("post_attention_layernorm.weight",),
}
FAMILIES = (
    Family(
        name="phimoe",
        architecture="PhimoeForCausalLM",
        spellings=("PhiMoEForCausalLM",),
        read=_read_phimoe,
        reads=("attention_bias", "num_local_experts"),
        write=_write_phimoe,
        feed_forwards=(Experts,),
        tensors=_TENSORS,
        gguf=Gguf(
            {**gguf_names.LAYER_NORMED, **gguf_names.EXPERTS},
            readers={
                "phimoe": GgufReader(
                    _gguf_phimoe,
                    (*gguf_mixtures.COUNTS, gguf_windows.WINDOW, gguf_rope.ATTENTION_FACTOR),
                )
            },
            writer=GgufWriter("phimoe", phi3.gguf_metadata),
        ),
    ),
)
