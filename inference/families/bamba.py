"""Bamba (IBM, Princeton & UIUC 2024): Mamba-2, and attention in the layers that are listed."""

from configs.kinds.attention import Attention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import export_fields, fields, hf_names, parts, rope_keys, state_space
from inference.families.shared.config_keys import Keys

_DEFAULTS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}  # fmt: skip


def _read_bamba(keys: Keys) -> ModelFields:
    keys = keys.with_defaults(_DEFAULTS)
    keys.require_neutral(partial_rotary_factor=(0.5, None))  # another stands in an object
    rope = rope_keys.partial(keys, 10_000.0, 0.5)
    mixers = fields.attention(keys, rope=rope), state_space.mamba2(keys, state_space.expanded(keys))
    layers = fields.num_layers(keys)
    attends = fields.numbered(keys, "attn_layer_indices", layers)
    per_layer = [mixers[layer not in attends] for layer in range(layers)]
    return fields.model(keys, rope, per_layer, eps=1e-5)


def _write_bamba(config: ModelConfig) -> dict[str, object]:
    """Returns the keys, with `rope_parameters`, because the older object has no share."""
    attends = [n for n, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)]
    raw = state_space.expanded_keys(config) | {"attn_layer_indices": attends}
    rope = state_space.attention(config).rope or Rope(share=0.5)
    positions = export_fields.rope_scaling(rope.scaling) or {"rope_type": "default"}
    positions |= {"rope_theta": rope.theta, "partial_rotary_factor": rope.share}
    return raw | {"rope_scaling": None, "rope_parameters": positions}


FAMILIES = (
    Family(
        name="bamba",
        architecture="BambaForCausalLM",
        read=_read_bamba,
        reads=("attention_bias", "mlp_bias"),
        write=_write_bamba,
        mixers=(Attention, Mamba2),
        tensors=hf_names.HYBRID,
        splits=(parts.mamba2,),
    ),
)
