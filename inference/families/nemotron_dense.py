"""Nemotron-4 (NVIDIA 2024, arXiv 2402.16819) and Minitron (Muralidharan et al. 2024, arXiv
2407.14679): layer norms by weights less one, a plain feed-forward, relu(x) squared, and half of
each head rotates.
"""

import dataclasses

from configs.kinds.feed_forward import Plain
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import export_fields, fields, gguf_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys

_NORMED: ModelFields = {"norm": "layer", "norm_offset": 1.0}


def _read_nemotron(keys: Keys) -> ModelFields:
    keys.choice("hidden_act", {"relu2": "relu2"}, "relu2")
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    ffn = fields.plain(keys, "relu2", keys.boolean("mlp_bias", False))
    return {
        **fields.layer_normed(keys, rope, key="norm_eps"),
        **_NORMED,
        "pattern": fields.pattern(fields.attention(keys, rope=rope), ffn),
    }


def _write_nemotron(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    return export_fields.layer_normed(config, "norm_eps") | {
        "hidden_act": "relu2",
        "mlp_bias": ffn.has_bias,
        "partial_rotary_factor": (attention.rope or Rope()).share,
    }


def _gguf_nemotron(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    biases = ("qkv", "out") if keys.has_tensor("blk.0.attn_q.bias") else ()
    ffn = Plain(keys.ffn_width, "relu2", keys.has_tensor("blk.0.ffn_up.bias"))
    return {**_NORMED, "pattern": (LayerSpec(keys.attention(rope, biases=biases), ffn),)}


FAMILIES = (
    Family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        read=_read_nemotron,
        reads=("attention_bias", "mlp_bias"),
        write=_write_nemotron,
        tensors={
            **hf_names.PLAIN,
            "final_norm/weight": ("model.norm.weight",),
            "mixer_norm/weight": ("input_layernorm.weight",),
            "ffn_norm/weight": ("post_attention_layernorm.weight",),
        },
        gguf=Gguf(
            gguf_names.LAYER_NORMED,
            readers={
                "nemotron": GgufReader(
                    _gguf_nemotron, free_widths=("rope.dimension_count",), epsilon=LAYER_EPSILON
                )
            },
            writer=GgufWriter("nemotron"),
        ),
    ),
)
