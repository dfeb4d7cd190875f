"""Command R (Cohere 2024) and Command A (Cohere 2025, arXiv 2504.00698): attention and feed-forward
read one layer norm without a bias, side by side.
"""

import dataclasses
from collections.abc import Sequence

from configs.kinds.attention import Attention
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import (
    Family,
    Gguf,
    GgufReader,
    GgufWriter,
    Metadata,
    ModelFields,
    Table,
)
from inference.families.shared import export_fields, fields, hf_names, parts, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys

_NORM = "layer_unbiased"


def _read_cohere(keys: Keys) -> ModelFields:
    rope = _neighbours(rope_keys.read(keys, 500_000.0))
    qk_norm = "each" if keys.boolean("use_qk_norm", False) else None
    return _fields(keys, rope, [fields.attention(keys, rope=rope, qk_norm=qk_norm)])


def _read_cohere2(keys: Keys) -> ModelFields:
    # What published files state, and transformers takes for granted.
    keys.require_neutral(
        use_qk_norm=(False, None), use_gated_activation=(True, None),
        use_parallel_block=(True, None), position_embedding_type=("rope_gptj", None),
        rotary_pct=(1, None), order_of_interleaved_layers=("local_attn_first", None),
    )  # fmt: skip
    rope = _neighbours(rope_keys.read(keys))
    full = fields.attention(keys, rope=None)
    window = keys.optional_integer("sliding_window", 4096)
    sliding = full if window is None else dataclasses.replace(full, rope=rope, window=window)
    period = keys.integer("sliding_window_pattern", 4, limit=MOST_LAYERS)
    repeated = fields.types(layer < period - 1 for layer in range(period))
    return _fields(keys, rope, fields.by_type(keys, full, sliding, repeated))


def _fields(keys: Keys, rope: Rope, mixers: Sequence[Attention]) -> ModelFields:
    """Returns the fields that both families share. Command R's files state the context that it was
    trained for apart, as the length of its tokenizer.
    """
    model = fields.layer_normed(keys, rope, tied=True)
    return {
        **model,
        "max_context": max(model["max_context"], keys.whole("model_max_length", 0)),
        "pattern": fields.pattern(mixers, fields.gated(keys), parallel_norms=1),
        "norm": _NORM,
        "logit_scale": keys.number("logit_scale", 0.0625),
    }


def _neighbours(rope: Rope) -> Rope:
    return dataclasses.replace(rope, neighbours=True)


def _write_cohere(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    return export_fields.layer_normed(config) | {
        "logit_scale": config.logit_scale,
        "use_qk_norm": attention.qk_norm is not None,
    }


def _write_cohere2(config: ModelConfig) -> dict[str, object]:
    raw = export_fields.layer_normed(config) | export_fields.layer_types(config)
    return raw | {"logit_scale": config.logit_scale}


_WINDOW = "attention.sliding_window"
_PERIOD = 4  # of windows in llama.cpp


def _gguf_cohere(keys: GgufKeys) -> ModelFields:
    has_norms = keys.has_tensor("blk.0.attn_q_norm.weight")
    rope = _neighbours(keys.rope())
    return _gguf_fields(keys, [keys.layer(rope, qk_norm="each" if has_norms else None)])


def _gguf_cohere2(keys: GgufKeys) -> ModelFields:
    local = keys.layer(_neighbours(keys.rope()), window=keys.integer(_WINDOW))
    return _gguf_fields(keys, [local] * (_PERIOD - 1) + [keys.layer(None)])


def _gguf_fields(keys: GgufKeys, layers: Sequence[LayerSpec]) -> ModelFields:
    return {
        "pattern": tuple(dataclasses.replace(layer, parallel_norms=1) for layer in layers),
        "norm": _NORM,
        "logit_scale": keys.number("logit_scale", 1.0),
    }


def _gguf_scale(config: ModelConfig) -> Metadata:
    return {"logit_scale": config.logit_scale}


def _gguf_window(config: ModelConfig) -> Metadata:
    windows = [mixer.window for mixer in config.mixers(Attention) if mixer.window is not None]
    return _gguf_scale(config) | ({_WINDOW: windows[0]} if windows else {})


_TENSORS: Table = {
    **hf_names.LLAMA,
    "mixer/q_norm": ("self_attn.q_norm.weight.heads",),
    "mixer/k_norm": ("self_attn.k_norm.weight.heads",),
}
FAMILIES = (
    Family(
        name="cohere",
        architecture="CohereForCausalLM",
        read=_read_cohere,
        reads=("attention_bias",),
        write=_write_cohere,
        tensors=_TENSORS,
        splits=(parts.head_norms,),
        gguf=Gguf(
            readers={
                "command-r": GgufReader(_gguf_cohere, ("logit_scale",), epsilon=LAYER_EPSILON)
            },
            writer=GgufWriter("command-r", _gguf_scale),
        ),
    ),
    Family(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        read=_read_cohere2,
        reads=("attention_bias",),
        write=_write_cohere2,
        tensors=hf_names.LLAMA,
        gguf=Gguf(
            readers={
                "cohere2": GgufReader(
                    _gguf_cohere2, ("logit_scale", _WINDOW), epsilon=LAYER_EPSILON
                )
            },
            writer=GgufWriter("cohere2", _gguf_window),
        ),
    ),
)
