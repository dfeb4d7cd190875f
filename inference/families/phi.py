"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv
2309.05463): attention and a plain feed-forward read one layer norm, side by side, with biases
everywhere.
"""

import dataclasses

from configs.kinds.feed_forward import Plain
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import export_fields, fields, gguf_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys

_BIASES = "qkv", "out"


def _read_phi(keys: Keys) -> ModelFields:
    keys.require_neutral(qk_layernorm=(False, None))
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    attention = fields.attention(keys, rope=rope, biases=_BIASES)
    ffn = fields.plain(keys, "gelu_new", has_bias=True)
    return {
        **fields.layer_normed(keys, rope),
        "pattern": fields.pattern(attention, ffn, parallel_norms=1),
        "has_head_bias": True,
    }


def _write_phi(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    raw = export_fields.layer_normed(config)
    del raw["attention_bias"]
    return raw | {
        "hidden_act": export_fields.plain_activation(ffn.activation),
        "partial_rotary_factor": (attention.rope or Rope()).share,
        "qk_layernorm": False,
    }


def _gguf_phi(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    attention = keys.attention(rope, biases=_BIASES)
    ffn = Plain(keys.ffn_width, "gelu_tanh", has_bias=True)
    return {
        "pattern": (LayerSpec(attention, ffn, parallel_norms=1),),
        "norm": "layer",
        "has_head_bias": True,
    }


_TENSORS: Table = {
    **hf_names.LLAMA,
    "final_norm/weight": ("model.final_layernorm.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    "mixer/out": ("self_attn.dense.weight",),
    "ffn/up": ("mlp.fc1.weight",),
    "ffn/down": ("mlp.fc2.weight",),
}
FAMILIES = (
    Family(
        name="phi",
        architecture="PhiForCausalLM",
        read=_read_phi,
        write=_write_phi,
        tensors=_TENSORS,
        gguf=Gguf(
            gguf_names.LAYER_NORMED,
            readers={
                "phi2": GgufReader(
                    _gguf_phi, free_widths=("rope.dimension_count",), epsilon=LAYER_EPSILON
                )
            },
            writer=GgufWriter("phi2"),
        ),
    ),
)
