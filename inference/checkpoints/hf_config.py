"""`config.json` as transformers reads it, written from a `ModelConfig`.

The spelling is that of transformers 4, which 5 reads too. What is written is read back and has to
give the same model: a field that no family writes here is an error, never a loss.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import InputError
from configs.model import ModelConfig, Rope
from inference.checkpoints import huggingface


def of_model(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model.

    Raises:
        InputError: its family, or something about it, has no counterpart here.
    """
    builder = _FAMILIES.get(config.family)
    if builder is None:
        raise InputError(
            f"the family {config.family} of {config.name} is written as transformers has it only "
            "from a checkpoint that brings its config.json"
        )
    raw = _widths(config) | builder(config)
    found = huggingface.parse_config(raw, Path(config.name))
    for field in dataclasses.fields(ModelConfig):
        before, after = getattr(config, field.name), getattr(found, field.name)
        before, after = (
            (config.layers, found.layers) if field.name == "pattern" else (before, after)
        )
        if field.name not in ("name", "dtype") and before != after:
            raise InputError(f"{config.name}: model.{field.name} has no place in a config.json")
    return raw


def with_dtype(raw: dict[str, Any], dtype: str, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """A `config.json` whose weights are stored as `dtype`."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    ends = {} if raw.get("eos_token_id") is not None or not eos_ids else {"eos_token_id": eos_ids}
    return raw | {key: dtype} | ends


def _widths(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "use_cache": True,
    }


def _llama(config: ModelConfig) -> dict[str, Any]:
    rope = config.layers[0].rope
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
    }


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    distant = [layer for layer in config.layers if layer.window is None]
    near = [layer for layer in config.layers if layer.window is not None]
    scale = config.attention_scale
    raw: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.head_width if scale is None else round(scale**-2, 6),
        "layer_types": [
            "full_attention" if layer.window is None else "sliding_attention"
            for layer in config.layers
        ],
    }
    if distant:
        raw |= {
            "rope_theta": distant[0].rope.theta,
            "rope_scaling": _scaling(distant[0].rope),
        }
    if near:
        raw |= {"rope_local_base_freq": near[0].rope.theta, "sliding_window": near[0].window}
    return raw


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return scaling


_FAMILIES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": _llama,
    "gemma3": _gemma3,
}
