"""GLM-4 (GLM Team 2024, arXiv 2406.12793) and GLM-4-0414 (2025), which adds norms behind attention
and feed-forward: half of each head rotates, in pairs side by side.
"""

import dataclasses

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import export_fields, fields, gguf_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_glm(keys: Keys) -> ModelFields:
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    rope = dataclasses.replace(rope, neighbours=True)
    biases = ("qkv",) if keys.boolean("attention_bias", True) else ()
    keys = keys.with_defaults({"head_dim": 128, "num_key_value_heads": 2})
    attention = fields.attention(keys, rope=rope, biases=biases)
    return fields.model(keys, rope, attention, eps=1.5625e-07)


def _read_glm4(keys: Keys) -> ModelFields:
    return {**_read_glm(keys), "post_norms": True}


def _write_glm(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    return export_fields.llama_fields(config) | {
        "attention_bias": "qkv" in attention.biases,
        "partial_rotary_factor": (attention.rope or Rope()).share,
    }


def _gguf_glm(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share, neighbours=True)
    biases = ("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else ()
    return {"pattern": (keys.layer(rope, biases=biases),)}


def _gguf_glm4(keys: GgufKeys) -> ModelFields:
    return {**_gguf_glm(keys), "post_norms": True}


_FUSED: Table = {**hf_names.LLAMA, "ffn/gate_up": ("mlp.gate_up_proj.weight",)}
_GGUF: Table = {**gguf_names.LLAMA, "ffn/gate_up": ("ffn_up.weight",)}
_ROTATED = ("rope.dimension_count",)
FAMILIES = (
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        read=_read_glm4,
        reads=("attention_bias",),
        write=_write_glm,
        tensors={
            **_FUSED,
            "mixer_post_norm": ("post_self_attn_layernorm.weight",),
            "ffn_post_norm": ("post_mlp_layernorm.weight",),
        },
        gguf=Gguf(
            _GGUF,
            readers={"glm4": GgufReader(_gguf_glm4, free_widths=_ROTATED)},
            writer=GgufWriter("glm4"),
        ),
    ),
    Family(
        name="glm",
        architecture="GlmForCausalLM",
        read=_read_glm,
        reads=("attention_bias",),
        write=_write_glm,
        tensors=_FUSED,
        gguf=Gguf(
            _GGUF,
            readers={"chatglm": GgufReader(_gguf_glm, free_widths=_ROTATED)},
            writer=GgufWriter("chatglm"),
        ),
    ),
)
