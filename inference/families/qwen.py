"""Qwen2 (Qwen Team 2024, arXiv 2407.10671), Qwen3 (2025, arXiv 2505.09388) and MiMo (Xiaomi 2025,
arXiv 2505.07608), which is Qwen2 without the layer that predicts a second token.
"""

from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import export_fields, fields, flax_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_qwen2(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    attention = fields.attention(keys, rope=rope, biases=("qkv",))
    return fields.model(keys, rope, fields.upper_windows(keys, attention))


def _read_mimo(keys: Keys) -> ModelFields:
    keys.require_neutral(attention_bias=(True, None))
    return _read_qwen2(keys)


def _read_qwen3(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    attention = fields.attention(keys, 128, rope=rope, qk_norm="head")
    return fields.model(keys, rope, fields.upper_windows(keys, attention))


def write(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of a `config.json`, with the window of each layer."""
    raw = export_fields.llama_fields(config) | export_fields.layer_types(config)
    return raw | {"use_sliding_window": raw["sliding_window"] is not None}


def _write_mimo(config: ModelConfig) -> dict[str, object]:
    return write(config) | {"attention_bias": True}


def _gguf_qwen2(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(keys.rope(), biases=("qkv",)),)}


def _gguf_qwen3(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(keys.rope(), qk_norm="head"),)}


FAMILIES = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        spellings=("Qwen2Model",),
        read=_read_qwen2,
        write=write,
        tensors=hf_names.LLAMA,
        flax=flax_names.QWEN,
        gguf=Gguf(readers={"qwen2": GgufReader(_gguf_qwen2)}, writer=GgufWriter("qwen2")),
    ),
    Family(
        name="mimo",
        architecture="MiMoForCausalLM",
        read=_read_mimo,
        reads=("attention_bias",),
        write=_write_mimo,
        tensors=hf_names.LLAMA,
        predictor="model.mtp_layers",
        gguf=Gguf(writer=GgufWriter("qwen2", read_as="qwen2")),
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        spellings=("Qwen3Model",),
        read=_read_qwen3,
        reads=("attention_bias",),
        write=write,
        tensors=hf_names.LLAMA,
        flax=flax_names.QWEN,
        wrapper="Qwen3VLForConditionalGeneration",
        ignored=("model.visual",),
        gguf=Gguf(readers={"qwen3": GgufReader(_gguf_qwen3)}, writer=GgufWriter("qwen3")),
    ),
)
