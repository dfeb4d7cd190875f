"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms, biases, a plain feed-forward
and a window.
"""

from configs.kinds.feed_forward import Plain
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

_BIASES = "qkv", "out"


def _read_starcoder2(keys: Keys) -> ModelFields:
    keys.require_neutral(mlp_type=("default", None), norm_type=("layer_norm", None))
    rope, has_bias = rope_keys.read(keys), keys.boolean("use_bias", True)
    window = keys.optional_integer("sliding_window")
    biases = _BIASES if has_bias else ()
    attention = fields.attention(keys, rope=rope, window=window, biases=biases)
    ffn = fields.plain(keys, "gelu_pytorch_tanh", has_bias)
    model = fields.layer_normed(keys, rope, tied=True, key="norm_epsilon")
    return {**model, "pattern": fields.pattern(attention, ffn)}


def _write_starcoder2(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    raw = export_fields.layer_normed(config, "norm_epsilon")
    del raw["attention_bias"]
    return raw | {
        "hidden_act": export_fields.plain_activation(ffn.activation),
        "sliding_window": attention.window,
        "use_bias": ffn.has_bias,
    }


_WINDOW = "attention.sliding_window"  # which llama.cpp does not read for this family


def _gguf_starcoder2(keys: GgufKeys) -> ModelFields:
    has_bias = keys.has_tensor("blk.0.attn_q.bias")
    window = keys.integer(_WINDOW) if keys.has(_WINDOW) else None
    biases = _BIASES if has_bias else ()
    attention = keys.attention(keys.rope(), biases=biases, window=window)
    ffn = Plain(keys.ffn_width, "gelu_tanh", has_bias)
    return {"pattern": (LayerSpec(attention, ffn),), "norm": "layer"}


def _gguf_window(config: ModelConfig) -> Metadata:
    window = export_fields.attention(config.layers[0]).window
    return {} if window is None else {_WINDOW: window}


_TENSORS: Table = {
    **hf_names.LLAMA,
    "final_norm/weight": ("model.norm.weight",),
    "mixer_norm/weight": ("input_layernorm.weight",),
    "ffn_norm/weight": ("post_attention_layernorm.weight",),
    "ffn/up": ("mlp.c_fc.weight",),
    "ffn/down": ("mlp.c_proj.weight",),
}
FAMILIES = (
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        read=_read_starcoder2,
        write=_write_starcoder2,
        tensors=_TENSORS,
        gguf=Gguf(
            gguf_names.LAYER_NORMED,
            readers={"starcoder2": GgufReader(_gguf_starcoder2, (_WINDOW,), epsilon=LAYER_EPSILON)},
            writer=GgufWriter("starcoder2", _gguf_window),
        ),
    ),
)
