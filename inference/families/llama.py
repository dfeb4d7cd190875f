"""Llama (Meta 2023-2025), Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and SmolLM3 (Hugging
Face 2025).
"""

import dataclasses

from configs.errors import InputError
from configs.model import ModelConfig
from inference.families import mistral, mixtral, qwen
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    flax_names,
    gguf_mixtures,
    gguf_rope,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_llama(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    return fields.model(keys, rope, fields.attention(keys, rope=rope))


def _read_mistral(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    keys.require_neutral(layer_types=(None,))  # Ministral's, which alternates windows
    window = keys.optional_integer("sliding_window", 4096)
    return fields.model(keys, rope, fields.attention(keys, rope=rope, window=window))


def _read_smollm3(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys, 2_000_000.0)
    layers = fields.num_layers(keys)
    period = keys.integer("no_rope_layer_interval", 4)
    rotates = keys.listed("no_rope_layers", layers)  # 1 where a layer does, despite the name
    if rotates is None:
        rotates = [int((layer + 1) % period != 0) for layer in range(layers)]
    if any(value not in (0, 1) for value in rotates):
        raise InputError(
            "no_rope_layers lists 1 for a layer that rotates and 0 for one that does not"
        )
    # `use_sliding_window` chooses the kinds where the file lists none; listed ones mask regardless.
    has_windows = keys.boolean("use_sliding_window", False)
    full = fields.attention(keys, rope=None)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window"))
    kinds = fields.types(has_windows and not turns for turns in rotates)
    pairs = zip(fields.by_type(keys, full, sliding, kinds), rotates, strict=True)
    mixers = [dataclasses.replace(mixer, rope=rope if turns else None) for mixer, turns in pairs]
    return fields.model(keys, rope, mixers, tied=True)


def _write_mistral(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    return export_fields.llama_fields(config) | {"sliding_window": attention.window}


def _write_smollm3(config: ModelConfig) -> dict[str, object]:
    rotates = [int(export_fields.attention(layer).rope is not None) for layer in config.layers]
    return qwen.write(config) | {"no_rope_layers": rotates}


def _gguf_llama(keys: GgufKeys) -> ModelFields:
    if keys.whole("expert_count"):  # llama.cpp has no other name for Mixtral
        return mixtral.gguf_experts(keys)
    return {"pattern": (keys.layer(gguf_rope.llama3(keys)),)}


def _gguf_smollm3(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(keys.rope()),) * 3 + (keys.layer(None),)}


_BIASED = ("attention_bias", "mlp_bias")
FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        spellings=("LlamaModel",),
        read=_read_llama,
        reads=_BIASED,
        write=export_fields.llama_fields,
        tensors=hf_names.LLAMA,
        flax=flax_names.LLAMA,
        gguf=Gguf(
            is_interleaved=True,
            readers={"llama": GgufReader(_gguf_llama, gguf_mixtures.COUNTS)},
            writer=GgufWriter("llama"),
        ),
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        spellings=("MistralModel",),
        read=_read_mistral,
        write=_write_mistral,
        tensors=hf_names.LLAMA,
        wrapper=mistral.WRAPPER,
        ignored=mistral.IMAGES,
        gguf=Gguf(writer=GgufWriter("llama", read_as="llama")),  # where a window has no place
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        read=_read_smollm3,
        reads=_BIASED,
        write=_write_smollm3,
        tensors=hf_names.LLAMA,
        gguf=Gguf(
            is_interleaved=True,
            readers={"smollm3": GgufReader(_gguf_smollm3)},
            writer=GgufWriter("smollm3"),
        ),
    ),
)
