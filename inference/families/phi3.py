"""Phi-3 (Abdin et al. 2024, arXiv 2404.14219)."""

import dataclasses

from configs.kinds.rope import LongRope, Rope
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata


def _read_phi3(keys: Keys) -> ModelFields:
    rope = _rope(keys.with_defaults({"original_max_position_embeddings": 4096}))
    attention = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    return fields.model(keys, rope, attention, eps=1e-5)


def _rope(keys: Keys) -> Rope:
    """Reads the RoPE of a share of each head; older files call longrope 'su' or 'yarn'."""
    stated = rope_keys.described(keys)
    share, theta = keys.number("partial_rotary_factor", 1.0), keys.number("rope_theta", 10_000.0)
    if stated is not None:
        share = stated.number("partial_rotary_factor", share)
        kind = stated.raw.get("rope_type", stated.raw.get("type"))
        kind = "longrope" if kind in ("su", "yarn") else kind
        stated = rope_keys.without_share(stated.updated({"rope_type": kind}))
    rope = rope_keys.scaled(rope_keys.without_share(keys), stated, theta)
    return dataclasses.replace(rope, share=share)


def _write_phi3(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    rope = attention.rope or Rope()
    scaling = rope.scaling
    original = scaling.original_context if isinstance(scaling, LongRope) else config.max_context
    return export_fields.llama_fields(config) | {
        "sliding_window": attention.window,
        "partial_rotary_factor": rope.share,
        "original_max_position_embeddings": original,
    }


def _gguf_phi3(keys: GgufKeys) -> ModelFields:
    rope, window = gguf_rope.longrope(keys), keys.whole(gguf_windows.WINDOW) or None
    return {"pattern": (keys.layer(rope, window=window),)}


def gguf_metadata(config: ModelConfig) -> Metadata:
    """Returns the window of all layers, 0 for none, and the positions'."""
    return {gguf_windows.WINDOW: gguf_windows.window(config), **gguf_rope.longrope_of(config)}


_TENSORS: Table = {
    **hf_names.LLAMA,
    "mixer/qkv": ("self_attn.qkv_proj.weight",),
    "ffn/gate_up": ("mlp.gate_up_proj.weight",),
}
_GGUF: Table = {
    **gguf_names.LLAMA,
    "mixer/qkv": ("attn_qkv.weight",),
    "ffn/gate_up": ("ffn_up.weight",),
}
FAMILIES = (
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        read=_read_phi3,
        write=_write_phi3,
        tensors=_TENSORS,
        gguf=Gguf(
            _GGUF,
            readers={
                "phi3": GgufReader(
                    _gguf_phi3,
                    (gguf_windows.WINDOW, gguf_rope.ATTENTION_FACTOR),
                    free_widths=("rope.dimension_count",),
                )
            },
            writer=GgufWriter("phi3", gguf_metadata),
        ),
    ),
)
