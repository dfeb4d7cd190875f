"""Gemma (Gemma Team 2024, arXiv 2403.08295), Gemma 2 (2024, arXiv 2408.00118) and Gemma 3 (2025,
arXiv 2503.19786).
"""

import dataclasses
from collections.abc import Sequence

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, Metadata, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    flax_names,
    gguf_rope,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def _read_gemma(keys: Keys) -> ModelFields:
    """Reads the first Gemma, where the older key of the activation means this one, too."""
    keys.choice("hidden_act", _GELU_TANH | {"gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    rope = rope_keys.read(keys)
    attention = fields.attention(keys, 256, rope=rope)
    return {**_fields(keys, [attention]), "post_norms": False}


def _read_gemma2(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    cap = keys.optional_number("attn_logit_softcapping", 50.0)
    full = fields.attention(keys, 256, rope=rope, scale=_scale(keys), score_cap=cap)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window", 4096))
    repeated = fields.types((True, False))
    cap = keys.optional_number("final_logit_softcapping", 30.0)
    return {**_fields(keys, fields.by_type(keys, full, sliding, repeated)), "logit_cap": cap}


# What published files of models that read images leave out of their text.
_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip


def _read_gemma3(keys: Keys) -> ModelFields:
    keys = keys.with_defaults(_DEFAULTS)
    distant, near = rope_keys.by_kind(keys)
    # transformers does not apply the family's `attn_logit_softcapping`
    heads = fields.attention(keys, 256, qk_norm="head", scale=_scale(keys))
    far = rope_keys.scaled(keys, distant, keys.number("rope_theta", 1_000_000.0))
    close = rope_keys.scaled(keys, near, keys.number("rope_local_base_freq", 10_000.0))
    window = keys.integer("sliding_window", 4096)
    full = dataclasses.replace(heads, rope=far)
    sliding = dataclasses.replace(heads, rope=close, window=window)
    period = keys.integer("sliding_window_pattern", 6, limit=MOST_LAYERS)
    repeated = fields.types(layer < period - 1 for layer in range(period))
    cap = keys.optional_number("final_logit_softcapping")
    return {**_fields(keys, fields.by_type(keys, full, sliding, repeated)), "logit_cap": cap}


def _fields(keys: Keys, mixers: Sequence[Attention]) -> ModelFields:
    """Returns the fields that Gemma 2 and 3 share."""
    activation = keys.choice("hidden_activation", _GELU_TANH, "gelu_pytorch_tanh")
    ffn = Gated(keys.integer("intermediate_size"), activation)
    model = fields.model(keys, Rope(), mixers, ffn, tied=True)  # nothing stretches the context
    return {
        **model,
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": model["width"] ** 0.5,
    }


def _scale(keys: Keys) -> float | None:
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    return None if scalar == keys.integer("head_dim", 256) else scalar**-0.5


def _write_first(config: ModelConfig) -> dict[str, object]:
    raw = export_fields.llama_fields(config) | {"hidden_act": "gelu_pytorch_tanh"}
    del raw["mlp_bias"]
    return raw


def _write_gemma(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    raw = export_fields.llama_fields(config)
    del raw["mlp_bias"], raw["hidden_act"]
    return raw | export_fields.layer_types(config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((attention.scale or attention.head_width**-0.5) ** -2),
        "attn_logit_softcapping": attention.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }  # fmt: skip


def _write_gemma3(config: ModelConfig) -> dict[str, object]:
    raw = _write_gemma(config)
    mixers = config.mixers(Attention)
    distant = [mixer.rope for mixer in mixers if mixer.window is None and mixer.rope]
    near = [mixer.rope for mixer in mixers if mixer.window is not None and mixer.rope]
    if distant:
        raw |= {
            "rope_theta": distant[0].theta,
            "rope_scaling": export_fields.rope_scaling(distant[0].scaling),
        }
    if near:
        raw |= {"rope_local_base_freq": near[0].theta}
    return raw if raw["sliding_window"] else raw | {"sliding_window": 4096}


_WINDOW = "attention.sliding_window"
# Layers of the one size of each family whose queries are scaled by D / N instead of H.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _gguf_gemma(keys: GgufKeys, pattern: Sequence[Attention], layers_of_27b: int) -> ModelFields:
    width = keys.integer("embedding_length")
    is_27b = keys.num_layers == layers_of_27b
    scale = (width / keys.integer("attention.head_count")) ** -0.5 if is_27b else None
    ffn = Gated(keys.ffn_width, "gelu_tanh")
    return {
        "pattern": tuple(
            LayerSpec(dataclasses.replace(mixer, scale=scale), ffn) for mixer in pattern
        ),
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": width**0.5,
    }


def _gguf_first(keys: GgufKeys) -> ModelFields:
    return {**_gguf_gemma(keys, (keys.attention(keys.rope()),), 0), "post_norms": False}


def _gguf_gemma2(keys: GgufKeys) -> ModelFields:
    full = keys.attention(keys.rope(), score_cap=keys.number("attn_logit_softcapping", 50.0))
    local = dataclasses.replace(full, window=keys.integer(_WINDOW, 4096))
    cap = keys.number("final_logit_softcapping", 30.0)
    return {**_gguf_gemma(keys, (local, full), _GEMMA2_27B_LAYERS), "logit_cap": cap}


def _gguf_gemma3(keys: GgufKeys) -> ModelFields:
    period = keys.integer(f"{_WINDOW}_pattern", 6)
    near = gguf_rope.near(keys)
    window = keys.integer(_WINDOW)
    local = keys.attention(near, window=window, qk_norm="head")
    distant = keys.attention(keys.rope(default=1_000_000.0), qk_norm="head")
    return _gguf_gemma(keys, [local] * (period - 1) + [distant], _GEMMA3_27B_LAYERS)


def _gguf_window_keys(config: ModelConfig) -> Metadata:
    windows = [mixer.window for mixer in config.mixers(Attention) if mixer.window is not None]
    return {_WINDOW: windows[0]} if windows else {}


def _gguf_gemma2_keys(config: ModelConfig) -> Metadata:
    caps = [mixer.score_cap for mixer in config.mixers(Attention)]
    caps_by_key = {"attn_logit_softcapping": caps[0], "final_logit_softcapping": config.logit_cap}
    return _gguf_window_keys(config) | {
        key: cap for key, cap in caps_by_key.items() if cap is not None
    }


def _gguf_gemma3_keys(config: ModelConfig) -> Metadata:
    mixers = [export_fields.attention(layer) for layer in config.layers]
    slides = [mixer.window is not None for mixer in mixers]
    period = slides.index(False) + 1 if False in slides else len(slides) + 1
    near = next((mixer.rope for mixer in mixers if mixer.window is not None), None) or Rope()
    metadata = _gguf_window_keys(config)
    if period != 6:
        metadata[f"{_WINDOW}_pattern"] = period
    if near.theta != 10_000.0:
        metadata[gguf_rope.NEAR_THETA] = near.theta
    return metadata


_CAPPED = ("attn_logit_softcapping", "final_logit_softcapping")
FAMILIES = (
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        read=_read_gemma,
        reads=("attention_bias",),
        write=_write_first,
        tensors=hf_names.LLAMA,
        flax=flax_names.GEMMA,
        gguf=Gguf(readers={"gemma": GgufReader(_gguf_first)}, writer=GgufWriter("gemma")),
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        read=_read_gemma2,
        reads=("attention_bias", *_CAPPED),
        write=_write_gemma,
        tensors=hf_names.POST_NORMED,
        flax=flax_names.GEMMA2,
        gguf=Gguf(
            readers={"gemma2": GgufReader(_gguf_gemma2, (_WINDOW, *_CAPPED))},
            writer=GgufWriter("gemma2", _gguf_gemma2_keys),
        ),
    ),
    Family(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        read=_read_gemma3,
        reads=("attention_bias", *_CAPPED),
        write=_write_gemma3,
        tensors=hf_names.POST_NORMED,
        flax=flax_names.GEMMA3,
        wrapper="Gemma3ForConditionalGeneration",
        ignored=tuple(
            f"{prefix}{part}"
            for prefix in ("", "model.")
            for part in ("vision_tower", "multi_modal_projector")
        ),
        gguf=Gguf(
            readers={
                "gemma3": GgufReader(
                    _gguf_gemma3, (_WINDOW, f"{_WINDOW}_pattern", gguf_rope.NEAR_THETA)
                )
            },
            writer=GgufWriter("gemma3", _gguf_gemma3_keys),
        ),
    ),
)
