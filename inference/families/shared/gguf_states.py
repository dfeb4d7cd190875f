"""Reads and writes layers with states in the metadata of `.gguf` files."""

from collections.abc import Mapping
from typing import Any

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer
from configs.kinds.experts import Experts
from configs.kinds.kind import FeedForward
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import ModelConfig
from inference.families.shared.gguf_keys import GgufKeys

Metadata = dict[str, object]  # of a `.gguf` file: integers become uint32, other numbers float32

NORMED = "ssm.dt_b_c_rms"
# Keys that architectures with states read, in addition to those of all.
MAMBA = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", NORMED)
MAMBA2 = (*MAMBA, "ssm.group_count")
_STATE_TENSORS = {"in": "ssm_in", "conv": "ssm_conv1d", "out": "ssm_out"}


def attention(keys: GgufKeys, layer: int, kv_heads: int, **fields: Any) -> Attention:
    """Returns a layer's attention, with the biases that the file has."""
    biases = _biases(keys, layer, {"qkv": "attn_q", "out": "attn_output"})
    heads, width = keys.integer("attention.head_count"), keys.head_width
    return Attention(heads, kv_heads, width, **{"rope": None, "biases": biases} | fields)


def _biases(keys: GgufKeys, layer: int, tensors: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        part for part, name in tensors.items() if keys.has_tensor(f"blk.{layer}.{name}.bias")
    )


def selective(keys: GgufKeys, layer: int) -> Mamba:
    """Returns a layer's Mamba."""
    return Mamba(
        keys.integer("ssm.inner_size"),
        keys.integer("ssm.state_size"),
        keys.integer("ssm.time_step_rank"),
        keys.integer("ssm.conv_kernel"),
        _biases(keys, layer, _STATE_TENSORS),
    )


def state_space(keys: GgufKeys, layer: int) -> Mamba2:
    """Returns a layer's Mamba-2, with a norm of each group of heads where the file has it."""
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    groups = keys.integer("ssm.group_count")
    if inner % heads or inner % groups:
        raise InputError(
            f"metadata {keys.architecture}.ssm.inner_size={inner} is no multiple of "
            f"ssm.time_step_rank={heads} and ssm.group_count={groups}"
        )
    has_norm = keys.has_tensor(f"blk.{layer}.ssm_norm.weight")
    return Mamba2(
        heads,
        inner // heads,
        keys.integer("ssm.state_size"),
        groups,
        keys.integer("ssm.conv_kernel"),
        _biases(keys, layer, _STATE_TENSORS),
        norm_width=inner // groups if has_norm else 0,
    )


def metadata(config: ModelConfig) -> Metadata:
    """Returns the keys of a model with states, except its sizes and its family's keys."""
    return {**_attention_keys(config), **_state_keys(config), **_ffn_keys(config)}


def _attention_keys(config: ModelConfig) -> Metadata:
    """Returns the keys of heads, which list key and value heads where layers differ."""
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


def _state_keys(config: ModelConfig) -> Metadata:
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


def _ffn_keys(config: ModelConfig) -> Metadata:
    """Returns the keys of feed-forwards, which list widths where layers have none, and experts."""
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
