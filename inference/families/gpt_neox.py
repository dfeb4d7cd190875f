"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia (Biderman et al. 2023, arXiv
2304.01373): attention and a plain feed-forward side by side, each by a layer norm of its own.
"""

import dataclasses

from configs.kinds.feed_forward import Plain
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import (
    Family,
    Gguf,
    GgufReader,
    GgufWriter,
    Metadata,
    ModelFields,
    Table,
)
from inference.families.shared import export_fields, fields, gguf_names, parts, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys


def _read_gpt_neox(keys: Keys) -> ModelFields:
    theta, share = keys.number("rotary_emb_base", 10_000.0), keys.number("rotary_pct", 0.25)
    rope = rope_keys.partial(keys, theta, share)
    biases = ("qkv", "out") if keys.boolean("attention_bias", True) else ()
    attention = fields.attention(keys, rope=rope, biases=biases)
    ffn = fields.plain(keys, "gelu", has_bias=True)
    norms = 2 if keys.boolean("use_parallel_residual", True) else 0
    return {
        **fields.layer_normed(keys, rope),
        "pattern": fields.pattern(attention, ffn, parallel_norms=norms),
    }


def _write_gpt_neox(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    raw, rope = export_fields.layer_normed(config), attention.rope or Rope()
    del raw["num_key_value_heads"], raw["head_dim"], raw["rope_theta"]
    return raw | {
        "hidden_act": export_fields.plain_activation(ffn.activation),
        "attention_bias": bool(attention.biases),
        "rotary_emb_base": rope.theta,
        "rotary_pct": rope.share,
        "use_parallel_residual": config.layers[0].parallel_norms == 2,
    }


_PARALLEL = "use_parallel_residual"


def _gguf_gpt_neox(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    attention = keys.attention(rope, biases=("qkv", "out"))
    ffn = Plain(keys.ffn_width, "gelu", has_bias=True)
    norms = 2 if keys.boolean(_PARALLEL, True) else 0
    return {"pattern": (LayerSpec(attention, ffn, parallel_norms=norms),), "norm": "layer"}


def _gguf_parallel(config: ModelConfig) -> Metadata:
    return {_PARALLEL: config.layers[0].parallel_norms == 2}


_TENSORS: Table = {
    "embed/table": ("gpt_neox.embed_in.weight",),
    "final_norm/weight": ("gpt_neox.final_layer_norm.weight",),
    "head/table": ("embed_out.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    **parts.fused_qkv("attention.query_key_value"),
    "mixer/out": ("attention.dense.weight",),
    "ffn_norm/weight": ("post_attention_layernorm.weight",),
    "ffn/up": ("mlp.dense_h_to_4h.weight",),
    "ffn/down": ("mlp.dense_4h_to_h.weight",),
}
FAMILIES = (
    Family(
        name="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        read=_read_gpt_neox,
        reads=("attention_bias",),
        write=_write_gpt_neox,
        tensors=_TENSORS,
        layers="gpt_neox.layers",
        splits=(parts.grouped_qkv,),
        also={"lm_head.weight": "embed_out.weight"},
        derived=(".attention.bias", ".attention.masked_bias"),  # causal masks
        gguf=Gguf(
            {**gguf_names.LAYER_NORMED, "mixer/qkv": ("attn_qkv.weight",)},
            readers={
                "gptneox": GgufReader(
                    _gguf_gpt_neox,
                    (_PARALLEL,),
                    free_widths=("rope.dimension_count",),
                    epsilon=LAYER_EPSILON,
                )
            },
            writer=GgufWriter("gptneox", _gguf_parallel),
        ),
    ),
)
