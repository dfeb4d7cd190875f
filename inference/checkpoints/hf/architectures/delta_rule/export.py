"""`config.json` of Qwen3-Next, Qwen3.5 and OLMo Hybrid: the inverse of `builders`."""

from typing import Any

from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.checkpoints.hf.architectures import mixtures_export


def qwen3_next(config: ModelConfig) -> dict[str, Any]:
    """See `builders.qwen3_next`."""
    shared = mixtures_export.mixture(config).shared_width
    return mixtures_export.qwen(config) | _mixers(config) | {
        "shared_expert_intermediate_size": shared,
    }  # fmt: skip


def qwen3_5(config: ModelConfig) -> dict[str, Any]:
    """See `builders.qwen3_5`."""
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export has seen to it"
    own = {"intermediate_size": ffn.width, "attn_output_gate": True}
    return mixtures_export.with_heads(config) | _mixers(config) | own


def olmo_hybrid(config: ModelConfig) -> dict[str, Any]:
    """See `builders.olmo_hybrid`."""
    raw = mixtures_export.with_heads(config)
    if mixtures_export.attention(config).rope is None:
        raw |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export has seen to it"
    return raw | _linear(config) | {
        "attention_bias": "out" in mixtures_export.attention(config).biases,
        "intermediate_size": ffn.width,
        "linear_allow_neg_eigval": delta_net(config).most_beta == 2,
    }  # fmt: skip


def _mixers(config: ModelConfig) -> dict[str, Any]:
    """Layers of Qwen's two kinds, and what differs from those that attend alone."""
    attention = mixtures_export.attention(config)
    return _linear(config) | {
        "attention_bias": "out" in attention.biases,
        "partial_rotary_factor": (attention.rope or Rope()).share,
    }


def _linear(config: ModelConfig) -> dict[str, Any]:
    """Which layers attend, and of the others their heads."""
    own = delta_net(config)
    return {
        "layer_types": _layer_types(config),
        "linear_num_value_heads": own.num_heads,
        "linear_num_key_heads": own.num_key_heads,
        "linear_key_head_dim": own.key_width,
        "linear_value_head_dim": own.value_width,
        "linear_conv_kernel_dim": own.conv_width,
    }


def delta_net(config: ModelConfig) -> DeltaNet:
    """The first such layer; where all attend, there is none to write."""
    return next(iter(config.mixers(DeltaNet)), DeltaNet(1, 1, 1, 1))


def _layer_types(config: ModelConfig) -> list[str]:
    kinds = [isinstance(layer.mixer, DeltaNet) for layer in config.layers]
    return ["linear_attention" if is_linear else "full_attention" for is_linear in kinds]
