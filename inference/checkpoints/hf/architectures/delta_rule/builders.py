"""Qwen3-Next, Qwen3.5 and OLMo Hybrid: gated DeltaNet, and attention over keys and values."""

from collections.abc import Callable, Sequence

from configs.errors import InputError, shown
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures import fields, mixtures, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

# Keys that are refused elsewhere, and read here.
QWEN = ("attention_bias",)
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
    return _qwen(keys, name, "qwen3_5", fields.gated(keys))


def olmo_hybrid(keys: Keys, name: str) -> ModelConfig:
    """OLMo Hybrid (Ai2 2026): OLMo 2's attention, norms behind it and its feed-forward, and layers
    with norms before a gated DeltaNet that may overshoot and before their feed-forward.
    """
    keys.require_neutral({"linear_use_gate": (True, None)})
    attention = fields.attention(keys, rope=_olmo_rope(keys), qk_norm="all")
    heads = keys.integer("linear_num_key_heads", attention.num_heads)
    three_quarters = max(3 * keys.integer("hidden_size") // (4 * heads), 1)
    key_width = keys.integer("linear_key_head_dim", three_quarters)
    mixer = DeltaNet(
        num_heads=keys.integer("linear_num_value_heads", attention.num_heads),
        num_key_heads=heads,
        key_width=key_width,
        value_width=keys.integer("linear_value_head_dim", 2 * key_width),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
        most_beta=2.0 if keys.boolean("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    last = keys.integer("num_hidden_layers", limit=MOST_LAYERS) - 1
    mixers = by_type(keys, mixer, attention, lambda layer: layer % 4 == 3 or layer == last < 3)
    ffn = fields.gated(keys)
    return ModelConfig(
        **fields.llama_fields(keys, name, "olmo_hybrid"),
        max_context=rope_keys.max_context(keys, attention.rope or Rope()),
        pattern=fields.repeated([LayerSpec(own, ffn, own == attention) for own in mixers]),
    )


def _olmo_rope(keys: Keys) -> Rope | None:
    """Without positions, where the base is null."""
    own = rope_keys.described(keys) or keys
    if own.raw.get("rope_theta", keys.raw.get("rope_theta", 10_000.0)) is None:
        return None
    return rope_keys.read(keys)


def _qwen(
    keys: Keys, name: str, family: str, ffns: FeedForward | Sequence[FeedForward]
) -> ModelConfig:
    keys.require_neutral({
        "attn_output_gate": (True, None),  # by a sigmoid
        "output_gate_type": ("swish", "silu", None),  # of the other layers
    })  # fmt: skip
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
    mixers = by_type(keys, mixer, attention, lambda layer: (layer + 1) % interval == 0)
    return ModelConfig(
        **fields.llama_fields(keys, name, family),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(mixers, ffns),
        norm_offset=1.0,
    )


def by_type(keys: Keys, linear: Mixer, full: Mixer, is_full: Callable[[int], bool]) -> list[Mixer]:
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
