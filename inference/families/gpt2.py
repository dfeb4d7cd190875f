"""GPT-2 (Radford et al. 2019)."""

import dataclasses

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Plain
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import export_fields, fields, gguf_names
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys


def _read_gpt2(keys: Keys) -> ModelFields:
    keys.require_neutral(add_cross_attention=(False, None))
    width, num_heads = keys.integer("n_embd", 768), keys.integer("n_head", 12)
    if width % num_heads:
        raise InputError(f"n_embd={width} is not a multiple of n_head={num_heads}")
    positions = keys.integer("n_positions", 1024)
    scale = None if keys.boolean("scale_attn_weights", True) else 1.0
    attention = Attention(
        num_heads, num_heads, width // num_heads, rope=None, biases=("qkv", "out"), scale=scale
    )
    num_layers = keys.integer("n_layer", 12, limit=MOST_LAYERS)
    mixers = [attention] * num_layers
    if keys.boolean("scale_attn_by_inverse_layer_idx", False):
        scale = attention.scale or attention.head_width**-0.5
        mixers = [dataclasses.replace(attention, scale=scale / n) for n in range(1, num_layers + 1)]
    names = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    activation = keys.choice("activation_function", names, "gelu_new")
    ffn = Plain(keys.integer("n_inner", 4 * width), activation, has_bias=True)
    return {
        "vocab_size": keys.integer("vocab_size", 50257),
        "width": width,
        "num_layers": num_layers,
        "max_context": positions,
        "pattern": fields.pattern(mixers, ffn),
        "norm": "layer",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "learned_positions": positions,
        "tied": keys.boolean("tie_word_embeddings", True),
    }


def _write_gpt2(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    scales = {mixer.scale for mixer in config.mixers(Attention)}
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_inner": ffn.width,
        "n_layer": config.num_layers,
        "n_head": attention.num_heads,
        "n_positions": config.learned_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "scale_attn_weights": attention.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len(scales) > 1,
    }


def _gguf_gpt2(keys: GgufKeys) -> ModelFields:
    positions = keys.shapes.get("position_embd.weight")
    if positions is None:
        raise InputError("tensor 'position_embd.weight' is missing")
    attention = keys.attention(None, biases=("qkv", "out"))
    ffn = Plain(keys.ffn_width, "gelu_tanh", has_bias=True)
    return {
        "pattern": (LayerSpec(attention, ffn),),
        "norm": "layer",
        "learned_positions": positions[0],
    }


_TENSORS: Table = {
    "embed/table": ("transformer.wte.weight",),
    "positions/table": ("transformer.wpe.weight",),
    "final_norm/weight": ("transformer.ln_f.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm/weight": ("ln_1.weight",),
    "mixer/qkv": ("attn.c_attn.weight",),
    "mixer/out": ("attn.c_proj.weight",),
    "ffn_norm/weight": ("ln_2.weight",),
    "ffn/up": ("mlp.c_fc.weight",),
    "ffn/down": ("mlp.c_proj.weight",),
}
_GGUF: Table = {
    **gguf_names.LLAMA,
    "positions/table": ("position_embd.weight",),
    "final_norm/weight": ("output_norm.weight",),
    "mixer_norm/weight": ("attn_norm.weight",),
    "mixer/qkv": ("attn_qkv.weight",),
    "ffn_norm/weight": ("ffn_norm.weight",),
    "ffn/up": ("ffn_up.weight",),
}
FAMILIES = (
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        read=_read_gpt2,
        write=_write_gpt2,
        tensors=_TENSORS,
        layers="transformer.h",
        transposed=("mixer/qkv", "mixer/out", "ffn/up", "ffn/down"),
        derived=(".attn.bias", ".attn.masked_bias"),  # causal masks
        gguf=Gguf(
            _GGUF,
            readers={"gpt2": GgufReader(_gguf_gpt2, epsilon=LAYER_EPSILON)},
            writer=GgufWriter("gpt2"),
        ),
    ),
)
