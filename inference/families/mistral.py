"""Ministral 3, Devstral 2 and Mistral Medium 3.5 (Mistral AI 2025-2026): Llama, with queries that
grow with their position.
"""

import dataclasses
import math

from configs.kinds.rope import Rope, Yarn
from configs.kinds.temperature import Temperature
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import export_fields, fields, gguf_rope, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import YARN, GgufKeys
from inference.families.shared.gguf_states import Metadata

WRAPPER = "Mistral3ForConditionalGeneration"
IMAGES = (
    "vision_tower",
    "multi_modal_projector",
    "model.vision_tower",
    "model.multi_modal_projector",
)
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    _ORIGINAL: 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def _read_ministral3(keys: Keys) -> ModelFields:
    keys.require_neutral(layer_types=(None,))  # which transformers reads as Ministral's
    stated = rope_keys.described(keys) or Keys(ROPE, "rope_parameters: ")
    rope = rope_keys.scaled(keys, stated, keys.number("rope_theta", 10_000.0))
    attention = fields.attention(
        keys, 128, rope=rope, window=keys.optional_integer("sliding_window"),
        temperature=temperature(stated),
    )  # fmt: skip
    return fields.model(keys, rope, attention, eps=1e-5)


def temperature(stated: Keys) -> Temperature | None:
    """Returns the temperature that `rope_parameters` describe."""
    if not stated.raw.get(_BETA):
        return None
    return Temperature(stated.number(_BETA), stated.integer(_ORIGINAL))


def stated_temperature(temperature: Temperature | None, longest: int) -> dict[str, object]:
    """Returns the keys of `rope_parameters`; `longest`, the context, stands where there is none."""
    if temperature is None:  # transformers wants both
        return {_BETA: 0.0, _ORIGINAL: longest}
    return {_BETA: temperature.scale, _ORIGINAL: temperature.length}


def _write_ministral3(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    raw = export_fields.llama_fields(config)
    scaling = export_fields.rope_scaling((attention.rope or Rope()).scaling)
    stated = stated_temperature(attention.temperature, config.max_context)
    both = {**stated, "rope_type": "default"} if scaling is None else {**stated, **scaling}
    return raw | {"rope_scaling": both, "sliding_window": attention.window}


_LOG_FACTOR = "rope.scaling.yarn_log_multiplier"


def _gguf_mistral3(keys: GgufKeys) -> ModelFields:
    """Reads Ministral 3, or an older Mistral, which has no temperature."""
    rope = _gguf_rope(keys)
    heated = gguf_rope.temperature(keys, rope)
    return {"family": "ministral3", "pattern": (keys.layer(rope, temperature=heated),)}


def _gguf_rope(keys: GgufKeys) -> Rope:
    """Returns the positions: llama.cpp stores `mscale_all_dim` and takes `mscale` for 1."""
    rope = keys.rope(has_yarn=True)
    if not isinstance(rope.scaling, Yarn) or not keys.get(_LOG_FACTOR, (float, int), 0.0):
        return rope
    factor, log_factor = rope.scaling.factor, keys.number(_LOG_FACTOR)
    scale = (0.1 * math.log(factor) + 1) / (0.1 * log_factor * math.log(factor) + 1)
    attention = scale if factor > 1 else 1.0
    return Rope(rope.theta, dataclasses.replace(rope.scaling, attention_factor=attention))


def _gguf_metadata(config: ModelConfig) -> Metadata:
    """Returns the keys of YaRN, which no other family writes, and of the temperature."""
    attention, _ = export_fields.first(config)
    yarn = None if attention.rope is None else attention.rope.scaling
    if not isinstance(yarn, Yarn):
        return {}
    metadata: Metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn.factor,
        "rope.scaling.yarn_beta_fast": yarn.beta_fast,
        "rope.scaling.yarn_beta_slow": yarn.beta_slow,
        _LOG_FACTOR: 0.0,
    }
    if yarn.attention_factor is not None and yarn.factor > 1:
        unit = 0.1 * math.log(yarn.factor)
        metadata[_LOG_FACTOR] = round(((unit + 1) / yarn.attention_factor - 1) / unit, 6)
    if attention.temperature is not None:
        metadata[gguf_rope.TEMPERATURE] = attention.temperature.scale
    return metadata


FAMILIES = (
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        read=_read_ministral3,
        write=_write_ministral3,
        tensors=hf_names.LLAMA,
        wrapper=WRAPPER,
        ignored=IMAGES,
        gguf=Gguf(
            is_interleaved=True,
            readers={
                "mistral3": GgufReader(_gguf_mistral3, (*YARN, gguf_rope.TEMPERATURE, _LOG_FACTOR))
            },
            writer=GgufWriter("mistral3", _gguf_metadata),
        ),
    ),
)
