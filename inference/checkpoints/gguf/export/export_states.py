"""Metadata of models with states, and the factors that llama.cpp has in their weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import ModelConfig

Metadata = dict[str, Any]


class Family(NamedTuple):
    """How llama.cpp writes a family with states.

    Attributes:
        architecture: its name there.
        metadata: the keys that only this family has.
        experts_architecture: its name where the model has experts.
        fold: removes from the model the factors that the file has in its weights.
        factors: these factors, by the endings of tensor names.
    """

    architecture: str
    metadata: Callable[[ModelConfig], Metadata] = lambda config: {}
    experts_architecture: str | None = None
    fold: Callable[[ModelConfig], ModelConfig] = lambda config: config
    factors: Callable[[ModelConfig], dict[str, float]] = lambda config: {}


def architecture(config: ModelConfig) -> str:
    """What llama.cpp calls a family with states."""
    family = FAMILIES[config.family]
    with_experts = family.experts_architecture if _experts(config) else None
    return with_experts or family.architecture


def metadata(config: ModelConfig) -> Metadata:
    """What a file of such a family says besides its sizes."""
    extra = FAMILIES[config.family].metadata(config)
    return {**_attention(config), **_recurrent(config), **_ffns(config), **extra}


def _attention(config: ModelConfig) -> Metadata:
    """Heads, and of each layer its keys' where not all layers have as many."""
    attends = [next((p for p in layer.mixer.parts if isinstance(p, Attention)), None)
               for layer in config.layers]  # fmt: skip
    first = next(filter(None, attends), None)
    if first is None:
        return {"attention.head_count": 0}
    kv_heads = [attention.num_kv_heads if attention else 0 for attention in attends]
    metadata: Metadata = {
        "attention.head_count": first.num_heads,
        "attention.head_count_kv": kv_heads[0] if len(set(kv_heads)) == 1 else kv_heads,
        "attention.key_length": first.head_width,
        "attention.value_length": first.head_width,
    }
    if first.rope is not None:
        metadata |= {"rope.freq_base": first.rope.theta, "rope.dimension_count": first.head_width}
    return metadata


def _recurrent(config: ModelConfig) -> Metadata:
    for kind in (part for layer in config.layers for part in layer.mixer.parts):
        if isinstance(kind, ShortConv):
            return {"shortconv.l_cache": kind.conv_width}
        if isinstance(kind, Mamba):
            inner, rank = kind.channels, kind.step_rank
        elif isinstance(kind, Mamba2):
            inner, rank = kind.inner_width, kind.num_heads
        else:
            continue
        metadata: Metadata = {
            "ssm.conv_kernel": kind.conv_width,
            "ssm.inner_size": inner,
            "ssm.state_size": kind.state_width,
            "ssm.time_step_rank": rank,
        }
        if isinstance(kind, Mamba2):
            metadata["ssm.group_count"] = kind.num_groups
        return metadata
    raise InputError(f"{config.name}: a model of {config.family} without states is not written")


def _ffns(config: ModelConfig) -> Metadata:
    """The width of a feed-forward, of each layer where some have none, and how experts route."""
    widths = [_width(layer.ffn) for layer in config.layers]
    is_listed = any(isinstance(layer.mixer, NoMixer) for layer in config.layers)
    metadata: Metadata = {"feed_forward_length": widths if is_listed else max(widths)}
    if experts := _experts(config):
        metadata |= {"expert_count": experts.num_experts, "expert_used_count": experts.top_k}
        if experts.shared_width:
            metadata["expert_shared_feed_forward_length"] = experts.shared_width
        if experts.router.scores == "sigmoid":
            metadata |= {
                "expert_feed_forward_length": experts.width,
                "expert_shared_count": 1,
                "expert_weights_norm": experts.router.is_normalized,
                "expert_weights_scale": experts.router.scale,
                "expert_group_count": experts.router.num_groups,
                "expert_group_used_count": experts.router.top_groups,
            }
        if experts.latent_width:
            metadata["moe_latent_size"] = experts.latent_width
    return metadata


def _width(ffn: FeedForward | None) -> int:
    return getattr(ffn, "width", 0)


def _experts(config: ModelConfig) -> Experts | None:
    ffns = (layer.ffn for layer in config.layers)
    return next((ffn for ffn in ffns if isinstance(ffn, Experts)), None)


def _granite(config: ModelConfig) -> Metadata:
    attention = next(iter(config.mixers(Attention)), None)
    scales: Metadata = (
        {} if attention is None or attention.scale is None else {"attention.scale": attention.scale}
    )
    return scales | {
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
        "rope.scaling.finetuned": attention is not None and attention.rope is not None,
    }


def folded(config: ModelConfig) -> ModelConfig:
    """The model without the factors that `factors` gives, which its weights take up.

    Raises:
        InputError: embedding and head are one table, and have factors of their own.
    """
    family = FAMILIES.get(config.family)
    return config if family is None else family.fold(config)


def factors(config: ModelConfig) -> dict[str, float]:
    """Factors that a file has in its weights and biases, by the endings of tensor names."""
    family = FAMILIES.get(config.family)
    return {} if family is None else family.factors(config)


def _fold_falcon_h1(config: ModelConfig) -> ModelConfig:
    if config.tied and config.embedding_scale != config.logit_scale:
        raise InputError(
            f"{config.name}: model.embedding_scale={config.embedding_scale} and "
            f"logit_scale={config.logit_scale} act on one table, and a .gguf file has its factors "
            "in its weights; --to=orbax keeps them"
        )
    pattern = []
    for layer in config.pattern:
        mixer, ffn = _parallel(layer.mixer), layer.ffn
        assert isinstance(ffn, Gated), "its builder has seen to it"
        attention = dataclasses.replace(mixer.attention, key_scale=1.0)
        state: Any = dataclasses.replace(_state_space(mixer), part_scales=())
        pattern.append(
            dataclasses.replace(
                layer,
                mixer=Parallel(attention, state),
                ffn=dataclasses.replace(ffn, gate_scale=1.0, down_scale=1.0),
            )
        )
    return dataclasses.replace(config, pattern=tuple(pattern), embedding_scale=1.0, logit_scale=1.0)


def _falcon_h1_factors(config: ModelConfig) -> dict[str, float]:
    """A factor on a layer's input scales its weights, and no bias."""
    mixer, ffn = _parallel(config.layers[0].mixer), config.layers[0].ffn
    assert isinstance(ffn, Gated), "its builder has seen to it"
    (read, fed), (attends, states) = mixer.in_scales, mixer.out_scales
    key, scales = mixer.attention.key_scale, _state_space(mixer).part_scales or (1.0,) * 5
    parts = dict(zip(("z", "x", "B", "C", "dt"), scales, strict=True))
    factors = {
        ".token_embd.weight": config.embedding_scale,
        ".output.weight": config.logit_scale,
        ".attn_q.weight": read,
        ".attn_k.weight": read * key,
        ".attn_k.bias": key,
        ".attn_v.weight": read,
        **{f".ssm_in.weight.{part}": fed * scale for part, scale in parts.items()},
        **{f".ssm_in.bias.{part}": scale for part, scale in parts.items()},
    }
    behind = {"attn_output": attends, "ssm_out": states, "ffn_gate": ffn.gate_scale,
              "ffn_down": ffn.down_scale}  # fmt: skip
    for name, scale in behind.items():
        factors |= {f".{name}.weight": scale, f".{name}.bias": scale}
    return {name: scale for name, scale in factors.items() if scale != 1.0}


def _parallel(mixer: Any) -> Parallel:
    assert isinstance(mixer, Parallel), "its builder has seen to it"
    return mixer


def _state_space(mixer: Parallel) -> Mamba2:
    assert isinstance(mixer.recurrent, Mamba2), "its builder has seen to it"
    return mixer.recurrent


FAMILIES: Mapping[str, Family] = {
    "mamba": Family("mamba", lambda config: {"ssm.dt_b_c_rms": False}),
    "falcon_mamba": Family("mamba", lambda config: {"ssm.dt_b_c_rms": True}),
    "mamba2": Family("mamba2"),
    "jamba": Family("jamba"),
    "lfm2": Family("lfm2"),
    "falcon_h1": Family("falcon-h1", fold=_fold_falcon_h1, factors=_falcon_h1_factors),
    "granitemoehybrid": Family("granitehybrid", _granite),
    "nemotron_h": Family(
        "nemotron_h",
        # newer llama.cpp loads no file without
        lambda config: {"attention.layer_norm_epsilon": config.norm_eps},
        experts_architecture="nemotron_h_moe",
    ),
}
