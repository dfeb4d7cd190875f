"""`config.json` as transformers reads it, written from a `ModelConfig`.

The spelling is that of transformers 4, which 5 reads too. What is written is read back and has to
give the same model: a field that no family writes here is an error, never a loss.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Rope, Scaling, Yarn
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints.hf import hf_directory

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Family(NamedTuple):
    """What transformers calls a family, and how its fields are written."""

    architecture: str
    model_type: str
    build: Callable[[ModelConfig], dict[str, Any]]


def of_model(config: ModelConfig, ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` of a model.

    Args:
        config: the model.
        ids: of its tokens, by the names they have there. Those that are not given are null: left
            out, they would be those of the family's best known vocabulary.

    Raises:
        InputError: its family, or something about it, has no counterpart here.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise InputError(f"{config.name}: the family {config.family} has no config.json")
    for layer in config.pattern:
        if not (isinstance(layer.mixer, Attention) and isinstance(layer.ffn, Gated | Plain)):
            kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
            raise InputError(f"{config.name}: a layer of {kinds} has no place in a config.json")
    raw = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.build(config),
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        **{name: (ids or {}).get(name) for name in _TOKEN_IDS},
    }
    found = hf_directory.parse_config(raw, Path(config.name))
    for field in dataclasses.fields(ModelConfig):
        name = "layers" if field.name == "pattern" else field.name
        if name not in ("name", "dtype") and getattr(config, name) != getattr(found, name):
            raise InputError(f"{config.name}: model.{field.name} has no place in a config.json")
    return raw


def with_dtype(raw: dict[str, Any], dtype: str, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """A `config.json` whose weights are stored as `dtype`."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    ends = {} if raw.get("eos_token_id") is not None or not eos_ids else {"eos_token_id": eos_ids}
    return raw | {key: dtype} | ends


def _attention(layer: LayerSpec) -> Attention:
    assert isinstance(layer.mixer, Attention), "of_model has seen to it"
    return layer.mixer


def _first(config: ModelConfig) -> tuple[Attention, Gated | Plain]:
    """The first layer, for what all layers of these families share."""
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated | Plain), "of_model has seen to it"
    return _attention(config.layers[0]), ffn


def _fields(config: ModelConfig) -> dict[str, Any]:
    """What all of Llama's relatives write alike."""
    attention, ffn = _first(config)
    rope = next((mixer.rope for mixer in config.mixers(Attention) if mixer.rope), Rope())
    longest, scaling = config.max_context, rope.scaling
    if isinstance(scaling, Dynamic):  # stretched from the length that the file states
        longest = scaling.original_context
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": ffn.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_width,
        "max_position_embeddings": longest,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(scaling),
        "attention_bias": "out" in attention.biases,
        "mlp_bias": ffn.has_bias,
    }


def _kinds(config: ModelConfig) -> dict[str, Any]:
    own = [_attention(layer).window for layer in config.layers]
    windows = {window for window in own if window is not None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in own]
    return {"layer_types": kinds, "sliding_window": max(windows, default=None)}


def _gemma(config: ModelConfig) -> dict[str, Any]:
    attention, _ = _first(config)
    others = ("mlp_bias", "hidden_act")
    fields = {key: value for key, value in _fields(config).items() if key not in others}
    return fields | _kinds(config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((attention.scale or attention.head_width**-0.5) ** -2),
        "attn_logit_softcapping": attention.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }  # fmt: skip


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    raw = _gemma(config)
    mixers = config.mixers(Attention)
    distant = [mixer.rope for mixer in mixers if mixer.window is None and mixer.rope]
    near = [mixer.rope for mixer in mixers if mixer.window is not None and mixer.rope]
    if distant:
        raw |= {"rope_theta": distant[0].theta, "rope_scaling": _scaling(distant[0].scaling)}
    if near:
        raw |= {"rope_local_base_freq": near[0].theta}
    return raw if raw["sliding_window"] else raw | {"sliding_window": 4096}


def _mistral(config: ModelConfig) -> dict[str, Any]:
    return _fields(config) | {"sliding_window": _first(config)[0].window}


def _qwen(config: ModelConfig) -> dict[str, Any]:
    kinds = _kinds(config)
    return _fields(config) | kinds | {"use_sliding_window": kinds["sliding_window"] is not None}


def _smollm3(config: ModelConfig) -> dict[str, Any]:
    rotates = [int(_attention(layer).rope is not None) for layer in config.layers]
    return _qwen(config) | {"no_rope_layers": rotates}


def _phi3(config: ModelConfig) -> dict[str, Any]:
    attention, _ = _first(config)
    rope = attention.rope or Rope()
    scaling = rope.scaling
    original = scaling.original_context if isinstance(scaling, LongRope) else config.max_context
    return _fields(config) | {
        "sliding_window": attention.window,
        "partial_rotary_factor": rope.share,
        "original_max_position_embeddings": original,
    }


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    attention, ffn = _first(config)
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_inner": ffn.width,
        "n_layer": config.num_layers,
        "n_head": attention.num_heads,
        "n_positions": config.learned_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if isinstance(scaling, LongRope):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
        }
    raw: dict[str, Any] = {"rope_type": _SCALINGS[type(scaling)], "factor": scaling.factor}
    if isinstance(scaling, Llama3):
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if isinstance(scaling, Yarn):
        raw |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        raw |= {"truncate": scaling.truncate}
        if scaling.attention_factor is not None:
            raw |= {"attention_factor": scaling.attention_factor}
    if isinstance(scaling, Llama3 | Yarn):
        raw |= {"original_max_position_embeddings": scaling.original_context}
    return raw


_SCALINGS = {Linear: "linear", Dynamic: "dynamic", Llama3: "llama3", Yarn: "yarn"}
FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _fields),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", _gemma),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gpt2": _Family("GPT2LMHeadModel", "gpt2", _gpt2),
    "mistral": _Family("MistralForCausalLM", "mistral", _mistral),
    "olmo2": _Family("Olmo2ForCausalLM", "olmo2", _fields),
    "phi3": _Family("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "smollm3": _Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
}
