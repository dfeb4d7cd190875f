"""Architectures with states, alone or beside attention, from a `.gguf` file's metadata."""

import dataclasses
from typing import Any

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.experts import Router
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import LayerSpec
from inference.checkpoints.gguf import gguf_mixtures
from inference.checkpoints.gguf.gguf_keys import Keys

_TAPS = "shortconv.l_cache"
_NORMED = "ssm.dt_b_c_rms"
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
# Keys that these architectures read, beside those of all.
MAMBA = (*("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", _NORMED),)
MAMBA2 = (*MAMBA, "ssm.group_count")
JAMBA = (*MAMBA, *gguf_mixtures.COUNTS)
LFM2 = (_TAPS,)
GRANITE = (*MAMBA2, *gguf_mixtures.ROUTED, *_SCALES)
NEMOTRON = (
    *(*MAMBA2, *gguf_mixtures.ROUTED, "expert_shared_count", "moe_latent_size"),
    "attention.layer_norm_epsilon",
)

# What the models have and no key states: llama.cpp takes another number, or none.
_FALCON_EPS, _LEAST_STEP = 1e-6, 0.001


def mamba(keys: Keys) -> dict[str, Any]:
    """Mamba and, with norms of what tokens choose, FalconMamba."""
    if not keys.boolean(_NORMED, False):
        return _mixers_alone("mamba", _selective(keys, 0))
    mixer = dataclasses.replace(_selective(keys, 0), norms="plain", norm_eps=_FALCON_EPS)
    return _mixers_alone("falcon_mamba", mixer)


def mamba2(keys: Keys) -> dict[str, Any]:
    """Mamba-2."""
    return _mixers_alone("mamba2", _state_space(keys, 0))


def jamba(keys: Keys) -> dict[str, Any]:
    """Jamba: attention where a layer has keys, and experts where it has a router."""
    layers, dense = [], Gated(keys.ffn_width)
    for layer, kv_heads in enumerate(keys.kv_heads()):
        mixer: Mixer = dataclasses.replace(_selective(keys, layer), norms="weighted")
        if kv_heads:
            mixer = _attention(keys, layer, kv_heads)
        ffn: FeedForward = dense
        if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
            ffn = gguf_mixtures.read_experts(keys, Router(is_normalized=False), keys.ffn_width)
        layers.append(LayerSpec(mixer, ffn))
    return {"pattern": tuple(layers)}


def lfm2(keys: Keys) -> dict[str, Any]:
    """LFM2: a convolution where a layer has no keys."""
    layers = []
    for layer, kv_heads in enumerate(keys.kv_heads()):
        has_bias = keys.has_tensor(f"blk.{layer}.shortconv.conv.bias")
        mixer: Mixer = ShortConv(keys.integer("embedding_length"), keys.integer(_TAPS), has_bias)
        if kv_heads:
            mixer = _attention(keys, layer, kv_heads, rope=keys.rope(), qk_norm="head")
        layers.append(LayerSpec(mixer, Gated(keys.ffn_width)))
    return {"pattern": tuple(layers)}


def falcon_h1(keys: Keys) -> dict[str, Any]:
    """Falcon-H1, whose factors the file's weights have in them."""
    attention = _attention(keys, 0, keys.integer("attention.head_count_kv"), rope=keys.rope())
    has_bias = keys.has_tensor("blk.0.ffn_down.bias")
    mixer = Parallel(attention, _state_space(keys, 0))
    pattern = (LayerSpec(mixer, Gated(keys.ffn_width, has_bias=has_bias)),)
    return {"family": "falcon_h1", "pattern": pattern}


def granite(keys: Keys) -> dict[str, Any]:
    """Granite 4 H."""
    scale = keys.number("attention.scale") if keys.has("attention.scale") else None
    rope = keys.rope() if keys.boolean("rope.scaling.finetuned", True) else None
    ffn: FeedForward = Gated(keys.ffn_width)
    if keys.whole("expert_count"):
        shared = keys.whole("expert_shared_feed_forward_length")
        ffn = gguf_mixtures.read_experts(keys, Router(), keys.ffn_width, shared_width=shared)
    layers = [
        LayerSpec(
            _attention(keys, layer, kv_heads, rope=rope, scale=scale)
            if kv_heads
            else _state_space(keys, layer),
            ffn,
        )
        for layer, kv_heads in enumerate(keys.kv_heads())
    ]
    return {
        "family": "granitemoehybrid",
        "pattern": tuple(layers),
        "embedding_scale": keys.number("embedding_scale", 1.0),
        "residual_scale": keys.number("residual_scale", 1.0),
        "logit_scale": 1 / keys.number("logit_scale", 1.0),
    }


def nemotron(keys: Keys) -> dict[str, Any]:
    """Nemotron-H: keys make a layer attention, a width makes it a feed-forward."""
    widths = keys.listed("feed_forward_length")
    layers = []
    for layer, (kv_heads, width) in enumerate(zip(keys.kv_heads(), widths, strict=True)):
        if kv_heads:
            layers.append(LayerSpec(_attention(keys, layer, kv_heads), None))
        elif width:
            layers.append(LayerSpec(NoMixer(), _nemotron_ffn(keys, layer, width)))
        else:
            mixer = dataclasses.replace(_state_space(keys, layer), step_limits=(_LEAST_STEP, None))
            layers.append(LayerSpec(mixer, None))
    return {"family": "nemotron_h", "pattern": tuple(layers)}


def _nemotron_ffn(keys: Keys, layer: int, width: int) -> FeedForward:
    if not keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
        return Plain(width, "relu2", has_bias=keys.has_tensor(f"blk.{layer}.ffn_down.bias"))
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    if router.num_groups == 1:
        router = dataclasses.replace(router, group_best=1)
    return gguf_mixtures.read_experts(
        keys,
        router,
        width,
        shared_width=keys.integer("expert_shared_feed_forward_length"),
        activation="relu2",
        is_gated=False,
        latent_width=keys.whole("moe_latent_size"),
        shared_bias=keys.has_tensor(f"blk.{layer}.ffn_down_shexp.bias"),
    )


def _mixers_alone(family: str, mixer: Mixer) -> dict[str, Any]:
    return {"family": family, "pattern": (LayerSpec(mixer, None),)}


def _attention(keys: Keys, layer: int, kv_heads: int, **own: Any) -> Attention:
    """With biases where the file has some."""
    places = {"qkv": "attn_q", "out": "attn_output"}
    biases = [b for b, name in places.items() if keys.has_tensor(f"blk.{layer}.{name}.bias")]
    heads, width = keys.integer("attention.head_count"), keys.head_width
    return Attention(heads, kv_heads, width, **{"rope": None, "biases": tuple(biases)} | own)


def _biases(keys: Keys, layer: int) -> tuple[str, ...]:
    places = {"in": "ssm_in", "conv": "ssm_conv1d", "out": "ssm_out"}
    found = [b for b, name in places.items() if keys.has_tensor(f"blk.{layer}.{name}.bias")]
    return tuple(found)


def _selective(keys: Keys, layer: int) -> Mamba:
    return Mamba(
        keys.integer("ssm.inner_size"),
        keys.integer("ssm.state_size"),
        keys.integer("ssm.time_step_rank"),
        keys.integer("ssm.conv_kernel"),
        _biases(keys, layer),
    )


def _state_space(keys: Keys, layer: int) -> Mamba2:
    """A norm behind the gate, of each group of heads, where the file has its weights."""
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    groups = keys.integer("ssm.group_count")
    if inner % heads or inner % groups:
        raise InputError(
            f"metadata {keys.family}.ssm.inner_size={inner} is no multiple of "
            f"ssm.time_step_rank={heads} and ssm.group_count={groups}"
        )
    has_norm = keys.has_tensor(f"blk.{layer}.ssm_norm.weight")
    return Mamba2(
        heads,
        inner // heads,
        keys.integer("ssm.state_size"),
        groups,
        keys.integer("ssm.conv_kernel"),
        _biases(keys, layer),
        norm_width=inner // groups if has_norm else 0,
    )
