"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, attention in some layers, and
behind the first layers experts.
"""

import dataclasses
from collections.abc import Sequence

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import (
    Family,
    Gguf,
    GgufReader,
    GgufWriter,
    Metadata,
    ModelFields,
    Table,
)
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_states,
    hf_names,
    mixtures,
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


_MIXTURE = {"hidden_size": 2048, "intermediate_size": 7168}


def _read_lfm2(keys: Keys) -> ModelFields:
    keys = _with_defaults(keys, _DEFAULTS)
    return _model(keys, _gated(keys))


def _read_lfm2_moe(keys: Keys) -> ModelFields:
    keys = _with_defaults(keys, _DEFAULTS | _MIXTURE)
    router = Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", True),
        keys.number("routed_scaling_factor", 1.0),
        has_offsets=keys.boolean("use_expert_bias", True),
    )
    width = keys.integer("moe_intermediate_size", 1792)
    experts = mixtures.experts(keys, "num_experts", 32, 4, width, router)
    dense = keys.whole("num_dense_layers", 2, limit=MOST_LAYERS)
    return _model(keys, mixtures.by_layer(keys, experts, lambda layer: layer >= dense))


def _with_defaults(keys: Keys, defaults: dict[str, int]) -> Keys:
    """Returns the object with values for absent keys and for keys that are null."""
    stated = {k: v for k, v in keys.raw.items() if v is not None or k not in defaults}
    return Keys(defaults | stated, keys.label)


def _model(keys: Keys, ffns: FeedForward | Sequence[FeedForward]) -> ModelFields:
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
        "pattern": fields.pattern([kinds[kind] for kind in _layer_types(keys)], ffns),
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
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export checks the kinds"
    return _write(config) | {"intermediate_size": ffn.width, "block_auto_adjust_ff_dim": False}


def _write_lfm2_moe(config: ModelConfig) -> dict[str, object]:
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    return _write(config) | {
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "num_dense_layers": len(dense),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "routed_scaling_factor": experts.router.scale,
        "use_expert_bias": experts.router.has_offsets,
    }


def _write(config: ModelConfig) -> dict[str, object]:
    """Returns the keys that both write."""
    attention = state_space.attention(config)
    convolution = next(iter(config.mixers(ShortConv)), ShortConv(config.width))
    raw = export_fields.sizes(config, attention.rope or Rope())
    del raw["rms_norm_eps"], raw["hidden_act"]
    return raw | {
        **export_fields.heads(attention),
        "norm_eps": config.norm_eps,
        "layer_types": [_KINDS[isinstance(layer.mixer, Attention)] for layer in config.layers],
        "conv_L_cache": convolution.conv_width,
        "conv_bias": convolution.has_bias,
    }


_TAPS = "shortconv.l_cache"


def _gguf_lfm2(keys: GgufKeys) -> ModelFields:
    return _gguf(keys, [Gated(keys.ffn_width)] * keys.num_layers)


def _gguf_lfm2_moe(keys: GgufKeys) -> ModelFields:
    dense = keys.whole("leading_dense_block_count", limit=MOST_LAYERS)
    router = dataclasses.replace(
        gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid"),
        has_offsets=keys.has_tensor(f"blk.{keys.num_layers - 1}.exp_probs_b.bias"),
        group_best=1,
    )
    experts = gguf_mixtures.read_experts(keys, router)
    ffns = (
        experts if layer >= dense else Gated(keys.ffn_width) for layer in range(keys.num_layers)
    )
    return _gguf(keys, list(ffns))


def _gguf(keys: GgufKeys, ffns: Sequence[FeedForward]) -> ModelFields:
    """Returns the layers with these feed-forwards: a layer without keys is a convolution."""
    layers = []
    for layer, kv_heads in enumerate(keys.kv_heads()):
        has_bias = keys.has_tensor(f"blk.{layer}.shortconv.conv.bias")
        mixer: Mixer = ShortConv(keys.integer("embedding_length"), keys.integer(_TAPS), has_bias)
        if kv_heads:
            mixer = gguf_states.attention(keys, layer, kv_heads, rope=keys.rope(), qk_norm="head")
        layers.append(LayerSpec(mixer, ffns[layer]))
    return {"pattern": tuple(layers)}


def _gguf_dense(config: ModelConfig) -> Metadata:
    """Returns the keys of experts, which llama.cpp's converter states so."""
    return {
        "leading_dense_block_count": len(mixtures.dense_layers(config)),
        "expert_gating_func": 2,
    }


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
_MIXTURE_TENSORS: Table = {
    **_TENSORS,
    "ffn/router": ("feed_forward.gate.weight",),
    "ffn/router_offsets": ("feed_forward.expert_bias",),
    "ffn/experts/gate_up": tuple(f"feed_forward.experts.{{}}.{w}.weight" for w in ("w1", "w3")),
    "ffn/experts/down": ("feed_forward.experts.{}.w2.weight",),
}
_GGUF: Table = {
    **gguf_names.EXPERTS,
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
    Family(
        name="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        read=_read_lfm2_moe,
        write=_write_lfm2_moe,
        mixers=(Attention, ShortConv),
        feed_forwards=(Gated, Experts),
        tensors=_MIXTURE_TENSORS,
        splits=(parts.conv_taps,),
        gguf=Gguf(
            _GGUF,
            readers={"lfm2moe": GgufReader(_gguf_lfm2_moe, (*gguf_mixtures.DENSE, _TAPS))},
            writer=GgufWriter("lfm2moe", _gguf_dense, has_states=True),
        ),
    ),
)
