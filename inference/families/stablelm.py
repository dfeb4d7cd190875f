"""StableLM (Tow et al. 2023; Bellagente et al. 2024, arXiv 2402.17834): Llama with layer norms, of
which a share of each head rotates. StableLM 2 12B has attention and feed-forward side by side, and
layer norms of each head by weights of its own.
"""

import dataclasses

from configs.kinds.feed_forward import Gated
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
from inference.families.shared import export_fields, fields, gguf_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys


def _read_stablelm(keys: Keys) -> ModelFields:
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.25))
    biases = ("qkv",) if keys.boolean("use_qkv_bias", False) else ()
    qk_norm = "each" if keys.boolean("qk_layernorm", False) else None
    attention = fields.attention(keys, rope=rope, biases=biases, qk_norm=qk_norm)
    norms = 1 if keys.boolean("use_parallel_residual", False) else 0
    pattern = fields.pattern(attention, fields.gated(keys), parallel_norms=norms)
    return {**fields.layer_normed(keys, rope), "pattern": pattern}


def _write_stablelm(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    raw = export_fields.layer_normed(config)
    del raw["attention_bias"], raw["head_dim"]
    return raw | {
        "partial_rotary_factor": (attention.rope or Rope()).share,
        "use_qkv_bias": bool(attention.biases),
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": config.layers[0].parallel_norms == 1,
    }


_PARALLEL = "use_parallel_residual"


def _gguf_stablelm(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    attention = keys.attention(
        rope,
        biases=("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else (),
        qk_norm="each" if keys.has_tensor("blk.0.attn_q_norm.weight") else None,
    )
    norms = 0 if keys.has_tensor("blk.0.ffn_norm.weight") else 1
    layer = LayerSpec(attention, Gated(keys.ffn_width), parallel_norms=norms)
    return {"pattern": (layer,), "norm": "layer"}


def _gguf_parallel(config: ModelConfig) -> Metadata:
    return {_PARALLEL: config.layers[0].parallel_norms == 1}


_TENSORS: Table = {
    **hf_names.LLAMA,
    "final_norm/weight": ("model.norm.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    "mixer/q_norm": ("self_attn.q_layernorm.norms.{}.weight",),
    "mixer/k_norm": ("self_attn.k_layernorm.norms.{}.weight",),
    "ffn_norm/weight": ("post_attention_layernorm.weight",),
}
FAMILIES = (
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        read=_read_stablelm,
        write=_write_stablelm,
        tensors=_TENSORS,
        gguf=Gguf(
            gguf_names.LAYER_NORMED,
            readers={
                "stablelm": GgufReader(
                    _gguf_stablelm,
                    (_PARALLEL,),
                    free_widths=("rope.dimension_count",),
                    epsilon=LAYER_EPSILON,
                )
            },
            writer=GgufWriter("stablelm", _gguf_parallel),
        ),
    ),
)
