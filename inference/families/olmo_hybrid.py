"""OLMo Hybrid (Ai2 2026): OLMo 2's layers, and layers with norms before a gated DeltaNet, whose
betas may exceed 1, and before the feed-forward.
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import delta_net, fields, hf_names, mixtures, parts, rope_keys
from inference.families.shared.config_keys import Keys


def _read_olmo_hybrid(keys: Keys) -> ModelFields:
    keys.require_neutral(linear_use_gate=(True, None))
    attention = fields.attention(keys, rope=_rope(keys), qk_norm="all")
    heads = keys.integer("linear_num_key_heads", attention.num_heads)
    three_quarters = max(3 * keys.integer("hidden_size") // (4 * heads), 1)
    key_width = keys.integer("linear_key_head_dim", three_quarters)
    linear = DeltaNet(
        num_heads=keys.integer("linear_num_value_heads", attention.num_heads),
        num_key_heads=heads,
        key_width=key_width,
        value_width=keys.integer("linear_value_head_dim", 2 * key_width),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
        most_beta=2.0 if keys.boolean("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    last = fields.num_layers(keys) - 1
    mixers = delta_net.by_type(
        keys, linear, attention, lambda layer: layer % 4 == 3 or layer == last < 3
    )
    ffn = fields.gated(keys)
    return {
        **fields.llama_fields(keys, attention.rope or Rope()),
        "pattern": fields.repeated([LayerSpec(mixer, ffn, mixer == attention) for mixer in mixers]),
    }


def _rope(keys: Keys) -> Rope | None:
    """Reads the RoPE; there is none where the base is null."""
    stated = rope_keys.described(keys) or keys
    if stated.raw.get("rope_theta", keys.raw.get("rope_theta", 10_000.0)) is None:
        return None
    return rope_keys.read(keys)


def _write_olmo_hybrid(config: ModelConfig) -> dict[str, object]:
    raw, attention = mixtures.with_heads(config), mixtures.attention(config)
    if attention.rope is None:
        raw |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export checks the kinds"
    return raw | delta_net.linear_keys(config) | {
        "attention_bias": "out" in attention.biases,
        "intermediate_size": ffn.width,
        "linear_allow_neg_eigval": delta_net.first(config).most_beta == 2,
    }  # fmt: skip


FAMILIES = (
    Family(
        name="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        read=_read_olmo_hybrid,
        reads=("attention_bias",),
        write=_write_olmo_hybrid,
        mixers=(Attention, DeltaNet),
        feed_forwards=(Gated,),
        tensors={
            **hf_names.POST_NORMED,
            **hf_names.delta_net("linear_attn"),
            "mixer_norm": ("attention_layer_norm.weight",),
            "ffn_norm": ("feedforward_layer_norm.weight",),
        },
        splits=(parts.delta_net,),
        recut=parts.separate_taps,
        also={
            "input_layernorm.weight": "attention_layer_norm.weight",
            "post_attention_layernorm.weight": "feedforward_layer_norm.weight",
            "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
        },
    ),
)
