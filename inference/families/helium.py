"""Helium (Kyutai 2025): Llama with rotary pairs side by side."""

import dataclasses

from configs.model import ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import export_fields, fields, hf_names, rope_keys
from inference.families.shared.config_keys import Keys


def _read_helium(keys: Keys) -> ModelFields:
    rope = dataclasses.replace(rope_keys.read(keys, 100_000.0), neighbours=True)
    biases = ("qkv",) if keys.boolean("attention_bias", False) else ()
    attention = fields.attention(keys.with_defaults({"head_dim": 128}), rope=rope, biases=biases)
    return fields.model(keys, rope, attention, eps=1e-8)


def _write_helium(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    return export_fields.llama_fields(config) | {"attention_bias": "qkv" in attention.biases}


FAMILIES = (
    Family(
        name="helium",
        architecture="HeliumForCausalLM",
        read=_read_helium,
        reads=("attention_bias", "mlp_bias"),
        write=_write_helium,
        tensors=hf_names.LLAMA,
    ),
)
