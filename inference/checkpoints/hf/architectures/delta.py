"""Architectures whose layers correct states by the delta rule, and one in a few attends."""

from collections.abc import Callable, Sequence

from configs.errors import InputError, shown
from configs.kinds.delta_net import DeltaNet
from configs.kinds.kind import FeedForward, Mixer
from configs.model import MOST_LAYERS, ModelConfig
from inference.checkpoints.hf.architectures import fields, mixtures, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

# Keys that are refused elsewhere, and read here.
QWEN = ("attention_bias", "partial_rotary_factor")
_QWEN3_NEXT = {"num_key_value_heads": 2, "intermediate_size": 5632}
_QWEN3_5 = {"num_key_value_heads": 4, "intermediate_size": 12288}


def qwen3_next(keys: Keys, name: str) -> ModelConfig:
    """Qwen3-Next (Qwen Team 2025): gated DeltaNet, attention with an output gate, and a mixture,
    without the layer that predicts a second token.
    """
    keys = Keys(_QWEN3_NEXT | keys.raw, keys.label)
    return _qwen(keys, name, "qwen3_next", mixtures.qwen3_next_ffns(keys))


def qwen3_5(keys: Keys, name: str) -> ModelConfig:
    """Qwen3.5 (Qwen Team 2026), the part that reads and writes text, with dense feed-forwards. The
    sections of its positions are equal in text.
    """
    keys = Keys(_QWEN3_5 | keys.raw, keys.label)
    keys.require_neutral({"attn_output_gate": (True, None)})
    return _qwen(keys, name, "qwen3_5", fields.gated(keys))


def _qwen(
    keys: Keys, name: str, family: str, ffns: FeedForward | Sequence[FeedForward]
) -> ModelConfig:
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.25))
    attention = fields.attention(keys, 256, rope=rope, qk_norm="head", has_output_gate=True)
    mixer = DeltaNet(
        num_heads=keys.integer("linear_num_value_heads", 32),
        num_key_heads=keys.integer("linear_num_key_heads", 16),
        key_width=keys.integer("linear_key_head_dim", 128),
        value_width=keys.integer("linear_value_head_dim", 128),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
    )
    interval = keys.integer("full_attention_interval", 4, limit=MOST_LAYERS)
    mixers = _by_type(keys, mixer, attention, lambda layer: (layer + 1) % interval == 0)
    return ModelConfig(
        **fields.llama_fields(keys, name, family),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(mixers, ffns),
        norm_offset=1.0,
    )


def _by_type(keys: Keys, linear: Mixer, full: Mixer, is_full: Callable[[int], bool]) -> list[Mixer]:
    """Every layer by `layer_types`, or by its number where the file lists none."""
    kinds = {"linear_attention": linear, "full_attention": full}
    count = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    names = keys.listed("layer_types", count)
    for kind in names or ():
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(kinds)}"
            )
    if names is None:
        return [full if is_full(layer) else linear for layer in range(count)]
    return [kinds[kind] for kind in names]
