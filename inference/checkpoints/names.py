"""Which tensors of a checkpoint make up each of our parameters.

A name map takes one of our paths ('layers/3/mixer/qkv') and gives the source tensors to stack along
their rows.
"""

import re
from collections.abc import Callable

from configs.errors import InputError

NameMap = Callable[[str], tuple[str, ...]]

_HUGGINGFACE = {
    "embed/table": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm": ("input_layernorm.weight",),
    "mixer/qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "mixer/out": ("self_attn.o_proj.weight",),
    "mixer/q_norm": ("self_attn.q_norm.weight",),
    "mixer/k_norm": ("self_attn.k_norm.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "ffn/gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn/down": ("mlp.down_proj.weight",),
}
_HUGGINGFACE_GEMMA3 = _HUGGINGFACE | {
    "mixer_post_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_feedforward_layernorm.weight",),
    "ffn_post_norm": ("post_feedforward_layernorm.weight",),
}
_GGUF = {
    "embed/table": ("token_embd.weight",),
    "final_norm": ("output_norm.weight",),
    "head/table": ("output.weight",),
    "mixer_norm": ("attn_norm.weight",),
    "mixer/qkv": tuple(f"attn_{part}.weight" for part in "qkv"),
    "mixer/out": ("attn_output.weight",),
    "mixer/q_norm": ("attn_q_norm.weight",),
    "mixer/k_norm": ("attn_k_norm.weight",),
    "mixer_post_norm": ("post_attention_norm.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    "ffn/gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "ffn/down": ("ffn_down.weight",),
    "ffn_post_norm": ("post_ffw_norm.weight",),
}
_LAYER = re.compile(r"layers/(\d+)/(.+)")


def huggingface(family: str) -> NameMap:
    """The map to the names transformers gives a family's tensors."""
    table = {"llama": _HUGGINGFACE, "gemma3": _HUGGINGFACE_GEMMA3}[family]
    return lambda path: _translate(path, table, "model.layers")


def gguf(path: str) -> tuple[str, ...]:
    """The map to llama.cpp's names."""
    return _translate(path, _GGUF, "blk")


def identity(path: str) -> tuple[str, ...]:
    """The map of a checkpoint that is stored under our own paths."""
    return (path,)


def _translate(path: str, table: dict[str, tuple[str, ...]], prefix: str) -> tuple[str, ...]:
    layer = _LAYER.fullmatch(path)
    names = table.get(layer[2] if layer else path)
    if names is None:
        raise InputError(f"parameter {path!r} has no counterpart in this checkpoint format")
    return tuple(f"{prefix}.{layer[1]}.{name}" for name in names) if layer else names
