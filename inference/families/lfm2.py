"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, and some layers attend."""

from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_states,
    hf_names,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_KINDS = "conv", "full_attention"


_DEFAULTS = {
    "vocab_size": 65_536, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12_288, "max_position_embeddings": 128_000,
}  # fmt: skip


_TAPS = "shortconv.l_cache"


def _read_lfm2(keys: Keys, name: str) -> ModelConfig:
    """The model that a `config.json` describes."""
    given = {k: v for k, v in keys.raw.items() if v is not None or k not in _DEFAULTS}
    keys = Keys(_DEFAULTS | given, keys.label)
    width = keys.integer("hidden_size")
    keys.require_neutral({
        "hidden_act": ("silu", None), "block_use_swiglu": (True, None),
        **{key: (width, None) for key in ("block_dim", "conv_dim", "conv_dim_out")},
    })  # fmt: skip
    rope = rope_keys.read(keys, 1_000_000.0)
    taps, has_bias = keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False)
    convolution = ShortConv(width, taps, has_bias)
    attention = fields.attention(keys, rope=rope, qk_norm="head")
    kinds = dict(zip(_KINDS, (convolution, attention), strict=True))
    return ModelConfig(
        name=name,
        family="lfm2",
        vocab_size=keys.integer("vocab_size"),
        width=width,
        num_layers=keys.integer("num_hidden_layers", limit=MOST_LAYERS),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern([kinds[kind] for kind in _layer_types(keys)], _gated(keys)),
        norm_eps=keys.number("norm_eps", 1e-5),
        tied=keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
    )


def _layer_types(keys: Keys) -> list[str]:
    """Listed, or by the numbers of the layers that attend: all of them, where none are given."""
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    listed = keys.listed("layer_types", layers)
    for kind in listed or ():
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InputError(f"layer type {shown(kind)} is not supported; valid: {_KINDS}")
    if listed is not None:
        return listed
    if keys.raw.get("full_attn_idxs") is None:
        return ["full_attention"] * layers
    attends = fields.numbered(keys, "full_attn_idxs", layers)
    return [_KINDS[layer in attends] for layer in range(layers)]


def _gated(keys: Keys) -> Gated:
    """Of the width that is stated, or of two thirds of it times a factor, rounded up."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size"))
    if keys.boolean("block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        factor = keys.optional_number("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            multiple = keys.integer("block_multiple_of", 256)
            width = -(-int(factor * width) // multiple) * multiple
    return Gated(width, "silu")


def _write_lfm2(config: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json`, which states the width that the feed-forward has."""
    own = next(iter(config.mixers(Attention)), Attention(1, 1, config.width))
    convolution = next(iter(config.mixers(ShortConv)), ShortConv(config.width))
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export has seen to it"
    sizes = export_fields.sizes(config, own.rope or Rope())
    unread = ("rms_norm_eps", "hidden_act")
    return {key: value for key, value in sizes.items() if key not in unread} | {
        **export_fields.heads(own),
        "norm_eps": config.norm_eps,
        "layer_types": [_KINDS[isinstance(each.mixer, Attention)] for each in config.layers],
        "conv_L_cache": convolution.conv_width,
        "conv_bias": convolution.has_bias,
        "intermediate_size": ffn.width,
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_lfm2(keys: GgufKeys) -> dict[str, Any]:
    """LFM2: a convolution where a layer has no keys."""
    layers = []
    for layer, kv_heads in enumerate(keys.kv_heads()):
        has_bias = keys.has_tensor(f"blk.{layer}.shortconv.conv.bias")
        mixer: Mixer = ShortConv(keys.integer("embedding_length"), keys.integer(_TAPS), has_bias)
        if kv_heads:
            mixer = gguf_states.attention(keys, layer, kv_heads, rope=keys.rope(), qk_norm="head")
        layers.append(LayerSpec(mixer, Gated(keys.ffn_width)))
    return {"pattern": tuple(layers)}


def _convolution_names(module: str) -> Table:
    """Of LFM2's convolutions."""
    return {
        "short_conv/in": (f"{module}.in_proj.weight",),
        "short_conv/conv": (f"{module}.conv.weight.taps",),
        "short_conv/conv_bias": (f"{module}.conv.bias",),
        "short_conv/out": (f"{module}.out_proj.weight",),
    }


_TENSORS: Table = {
    **hf_names.LLAMA,
    **_convolution_names("conv"),
    "final_norm": ("model.embedding_norm.weight",),
    "mixer_norm": ("operator_norm.weight",),
    "mixer/out": ("self_attn.out_proj.weight",),
    "mixer/q_norm": ("self_attn.q_layernorm.weight",),
    "mixer/k_norm": ("self_attn.k_layernorm.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    "ffn/gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "ffn/down": ("feed_forward.w2.weight",),
}


_GGUF: Table = {
    **gguf_names.LLAMA,
    "final_norm": ("token_embd_norm.weight",),
    "short_conv/in": ("shortconv.in_proj.weight",),
    "short_conv/conv": ("shortconv.conv.weight",),
    "short_conv/out": ("shortconv.out_proj.weight",),
}


FAMILIES = (
    Family(
        name="lfm2",
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        read=_read_lfm2,
        write=_write_lfm2,
        mixers=(Attention, ShortConv),
        tensors=_TENSORS,
        splits=(parts.short_conv,),
        gguf=Gguf(
            _GGUF,
            readers={"lfm2": GgufReader(_gguf_lfm2, (_TAPS,))},
            writer=GgufWriter("lfm2", has_states=True),
        ),
    ),
)
