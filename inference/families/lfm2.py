"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, attention in some layers."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_states,
    hf_names,
    parts,
    rope_keys,
    state_space,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_KINDS = "conv", "full_attention"
_DEFAULTS = {
    "vocab_size": 65_536, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12_288, "max_position_embeddings": 128_000,
}  # fmt: skip


def _read_lfm2(keys: Keys) -> ModelFields:
    stated = {k: v for k, v in keys.raw.items() if v is not None or k not in _DEFAULTS}
    keys = Keys(_DEFAULTS | stated, keys.label)
    width = keys.integer("hidden_size")
    keys.require_neutral(
        hidden_act=("silu", None),
        block_use_swiglu=(True, None),
        **{key: (width, None) for key in ("block_dim", "conv_dim", "conv_dim_out")},
    )
    rope = rope_keys.read(keys, 1_000_000.0)
    taps, has_bias = keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False)
    convolution = ShortConv(width, taps, has_bias)
    attention = fields.attention(keys, rope=rope, qk_norm="head")
    kinds = dict(zip(_KINDS, (convolution, attention), strict=True))
    return {
        "vocab_size": keys.integer("vocab_size"),
        "width": width,
        "num_layers": fields.num_layers(keys),
        "max_context": rope_keys.max_context(keys, rope),
        "pattern": fields.pattern([kinds[kind] for kind in _layer_types(keys)], _gated(keys)),
        "norm_eps": keys.number("norm_eps", 1e-5),
        "tied": keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
    }


def _layer_types(keys: Keys) -> list[str]:
    """Returns the listed kinds, or kinds by the numbers of layers that attend, by default all."""
    layers = fields.num_layers(keys)
    kinds = fields.layer_types(keys, _KINDS)
    if kinds is not None:
        return kinds
    if keys.raw.get("full_attn_idxs") is None:
        return ["full_attention"] * layers
    attends = fields.numbered(keys, "full_attn_idxs", layers)
    return [_KINDS[layer in attends] for layer in range(layers)]


def _gated(keys: Keys) -> Gated:
    """Returns a feed-forward of the stated width, or of 2/3 of it times a factor, rounded up."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size"))
    if keys.boolean("block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        factor = keys.optional_number("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            multiple = keys.integer("block_multiple_of", 256)
            width = -(-int(factor * width) // multiple) * multiple
    return Gated(width, "silu")


def _write_lfm2(config: ModelConfig) -> dict[str, object]:
    """Returns the keys, with the width that the feed-forward has."""
    attention = state_space.attention(config)
    convolution = next(iter(config.mixers(ShortConv)), ShortConv(config.width))
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export checks the kinds"
    raw = export_fields.sizes(config, attention.rope or Rope())
    del raw["rms_norm_eps"], raw["hidden_act"]
    return raw | {
        **export_fields.heads(attention),
        "norm_eps": config.norm_eps,
        "layer_types": [_KINDS[isinstance(layer.mixer, Attention)] for layer in config.layers],
        "conv_L_cache": convolution.conv_width,
        "conv_bias": convolution.has_bias,
        "intermediate_size": ffn.width,
        "block_auto_adjust_ff_dim": False,
    }


_TAPS = "shortconv.l_cache"


def _gguf_lfm2(keys: GgufKeys) -> ModelFields:
    """Reads LFM2: a layer without keys is a convolution."""
    layers = []
    for layer, kv_heads in enumerate(keys.kv_heads()):
        has_bias = keys.has_tensor(f"blk.{layer}.shortconv.conv.bias")
        mixer: Mixer = ShortConv(keys.integer("embedding_length"), keys.integer(_TAPS), has_bias)
        if kv_heads:
            mixer = gguf_states.attention(keys, layer, kv_heads, rope=keys.rope(), qk_norm="head")
        layers.append(LayerSpec(mixer, Gated(keys.ffn_width)))
    return {"pattern": tuple(layers)}


_TENSORS: Table = {
    **hf_names.LLAMA,
    "short_conv/in": ("conv.in_proj.weight",),
    "short_conv/conv": ("conv.conv.weight.taps",),
    "short_conv/conv_bias": ("conv.conv.bias",),
    "short_conv/out": ("conv.out_proj.weight",),
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
        read=_read_lfm2,
        write=_write_lfm2,
        mixers=(Attention, ShortConv),
        tensors=_TENSORS,
        splits=(parts.conv_taps,),
        gguf=Gguf(
            _GGUF,
            readers={"lfm2": GgufReader(_gguf_lfm2, (_TAPS,))},
            writer=GgufWriter("lfm2", has_states=True),
        ),
    ),
)
