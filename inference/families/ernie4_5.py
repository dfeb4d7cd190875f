"""ERNIE 4.5 (Baidu 2025), dense: Llama with rotary pairs side by side."""

import dataclasses

from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import export_fields, fields, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_ernie4_5(keys: Keys) -> ModelFields:
    keys.require_neutral(use_bias=(False, None))
    rope = dataclasses.replace(rope_keys.read(keys, 500_000.0), neighbours=True)
    attention = fields.attention(keys, 128, rope=rope)
    return fields.model(keys, rope, attention, tied=True, eps=1e-5)


def _write_ernie4_5(config: ModelConfig) -> dict[str, object]:
    return export_fields.llama_fields(config) | {"use_bias": False}


def _gguf_ernie4_5(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(dataclasses.replace(keys.rope(), neighbours=True)),)}


FAMILIES = (
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        read=_read_ernie4_5,
        write=_write_ernie4_5,
        tensors=hf_names.LLAMA,
        gguf=Gguf(readers={"ernie4_5": GgufReader(_gguf_ernie4_5)}, writer=GgufWriter("ernie4_5")),
    ),
)
