"""EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407): norms behind attention and feed-forward, and
in larger models windows, where layers without one do not rotate.
"""

import dataclasses

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_rope,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

_POST_NORMED: ModelFields = {"pre_norms": False, "post_norms": True}


def _read_exaone4(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    sliding = fields.attention(
        keys, rope=rope, qk_norm="head", window=keys.optional_integer("sliding_window", 4096)
    )
    full = sliding if sliding.window is None else _without_window(sliding)
    kinds = fields.types(sliding.window is not None and slides for slides in _pattern(keys))
    mixers = fields.by_type(keys, full, sliding, kinds)
    return {**fields.model(keys, rope, mixers, eps=1e-5), **_POST_NORMED}


def _without_window(sliding: Attention) -> Attention:
    return dataclasses.replace(sliding, window=None, rope=None)


def _pattern(keys: Keys) -> list[bool]:
    """Returns whether layers have a window, by letters that repeat, or by a period."""
    letters = keys.raw.get("sliding_window_pattern")
    if isinstance(letters, str):
        if not letters or set(letters) - {"L", "G"} or len(letters) > MOST_LAYERS:
            raise InputError(
                f"{keys.label}sliding_window_pattern has letters L and G, or is a period, not "
                f"{shown(letters)}"
            )
        return [letter == "L" for letter in letters]
    period = keys.whole("sliding_window_pattern", 4, limit=MOST_LAYERS)
    return [layer < period - 1 for layer in range(max(period, 1))]


def _write_exaone4(config: ModelConfig) -> dict[str, object]:
    raw = export_fields.llama_fields(config) | export_fields.layer_types(config)
    del raw["attention_bias"], raw["mlp_bias"]
    rotates = any(mixer.rope is not None for mixer in config.mixers(Attention))
    return raw if rotates else raw | {"sliding_window": 4096}


_WINDOW = "attention.sliding_window"


def _gguf_exaone4(keys: GgufKeys) -> ModelFields:
    window = keys.integer(_WINDOW) if keys.has(_WINDOW) else None
    sliding = keys.layer(gguf_rope.llama3(keys), qk_norm="head", window=window)
    if window is None:
        return {"pattern": (sliding,), **_POST_NORMED}
    full = keys.layer(None, qk_norm="head")
    slides = keys.booleans(f"{_WINDOW}_pattern", keys.num_layers) or (True, True, True, False)
    return {"pattern": tuple(sliding if slide else full for slide in slides), **_POST_NORMED}


def _gguf_windows(config: ModelConfig) -> Metadata:
    windows = [export_fields.attention(layer).window for layer in config.layers]
    if not any(windows):
        return {}
    slides = np.array([window is not None for window in windows])
    return {_WINDOW: max(filter(None, windows)), f"{_WINDOW}_pattern": slides}


FAMILIES = (
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        read=_read_exaone4,
        write=_write_exaone4,
        tensors=hf_names.POST_NORMED,
        gguf=Gguf(
            gguf_names.LLAMA,
            readers={"exaone4": GgufReader(_gguf_exaone4, (_WINDOW, f"{_WINDOW}_pattern"))},
            writer=GgufWriter("exaone4", _gguf_windows),
        ),
    ),
)
