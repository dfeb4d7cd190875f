"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): attention and a plain feed-forward side by
side. Falcon 7B has one key/value head and one norm, Falcon 40B and 180B groups of heads and two
norms, Falcon 2 11B groups and one norm.
"""

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Plain
from configs.model import LayerSpec, ModelConfig
from inference.families.family import (
    Family,
    Gguf,
    GgufReader,
    GgufWriter,
    InLayer,
    ModelFields,
    Table,
)
from inference.families.shared import export_fields, fields, gguf_names, parts, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys


def _read_falcon(keys: Keys) -> ModelFields:
    keys.require_neutral(alibi=(False, None))
    keys = keys.with_defaults({"max_position_embeddings": 2048})
    rope, has_bias = rope_keys.read(keys), keys.boolean("bias", False)
    is_new, is_parallel = (
        keys.boolean("new_decoder_architecture", False),
        keys.boolean("parallel_attn", True),
    )
    if is_new and not is_parallel:
        raise InputError("parallel_attn=False does not go with new_decoder_architecture=True")
    num_heads, width = keys.integer("num_attention_heads", 71), keys.integer("hidden_size", 4544)
    kv_heads = keys.integer("num_kv_heads", num_heads)
    if not is_new and keys.boolean("multi_query", True):
        kv_heads = 1
    biases = ("qkv", "out") if has_bias else ()
    attention = Attention(num_heads, kv_heads, max(width // num_heads, 1), rope, biases=biases)
    ffn_width = keys.integer("ffn_hidden_size", 4 * width)
    ffn = fields.plain(
        keys.updated({"intermediate_size": ffn_width}), "gelu", has_bias, key="activation"
    )
    norms = keys.integer("num_ln_in_parallel_attn", 2, limit=2) if is_new else int(is_parallel)
    return {
        **fields.layer_normed(keys, rope, tied=True, key="layer_norm_epsilon"),
        "pattern": fields.pattern(attention, ffn, parallel_norms=norms),
    }


def _write_falcon(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    norms = config.layers[0].parallel_norms
    is_new = norms == 2 or attention.num_kv_heads not in (1, attention.num_heads)
    raw = export_fields.layer_normed(config, "layer_norm_epsilon")
    for key in ("hidden_act", "head_dim", "num_key_value_heads", "attention_bias"):
        del raw[key]
    del raw["intermediate_size"]
    return raw | {
        "activation": export_fields.plain_activation(ffn.activation),
        "alibi": False,
        "bias": ffn.has_bias,
        "ffn_hidden_size": ffn.width,
        "new_decoder_architecture": is_new,
        "num_kv_heads": attention.num_kv_heads,
        "multi_query": attention.num_kv_heads == 1,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "parallel_attn": norms > 0,
    }


def _pair(mixer_norm: str, ffn_norm: str) -> InLayer:
    """Names two norms that stand side by side."""
    names = {"mixer_norm/weight": (mixer_norm,), "ffn_norm/weight": (ffn_norm,)}
    return lambda layer: names if layer.parallel_norms == 2 else {}


def _gguf_falcon(keys: GgufKeys) -> ModelFields:
    has_pair = keys.has_tensor("blk.0.attn_norm_2.weight")
    layer = LayerSpec(
        keys.attention(keys.rope()), Plain(keys.ffn_width, "gelu"), parallel_norms=1 + has_pair
    )
    return {"norm": "layer", "pattern": (layer,)}


_TENSORS: Table = {
    "embed/table": ("transformer.word_embeddings.weight",),
    "final_norm/weight": ("transformer.ln_f.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    **parts.fused_qkv("self_attention.query_key_value"),
    "mixer/out": ("self_attention.dense.weight",),
    "ffn_norm/weight": ("post_attention_layernorm.weight",),
    "ffn/up": ("mlp.dense_h_to_4h.weight",),
    "ffn/down": ("mlp.dense_4h_to_h.weight",),
}
FAMILIES = (
    Family(
        name="falcon",
        architecture="FalconForCausalLM",
        read=_read_falcon,
        write=_write_falcon,
        feed_forwards=(Plain,),
        tensors=_TENSORS,
        in_layer=_pair("ln_attn.weight", "ln_mlp.weight"),
        layers="transformer.h",
        splits=(parts.grouped_qkv,),
        gguf=Gguf(
            {**gguf_names.LAYER_NORMED, "mixer/qkv": ("attn_qkv.weight",)},
            in_layer=_pair("attn_norm_2.weight", "attn_norm.weight"),
            readers={"falcon": GgufReader(_gguf_falcon, epsilon=LAYER_EPSILON)},
            writer=GgufWriter("falcon"),
        ),
    ),
)
