"""Gemma 4 from a `.gguf` file's metadata."""

import dataclasses
from typing import Any

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention, sharing
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.rope import Proportional, Rope
from configs.model import LayerSpec
from inference.checkpoints.gguf import gguf_file
from inference.checkpoints.gguf.gguf_keys import Keys
from inference.checkpoints.gguf.tensor_names import ROPE_FACTORS

_WINDOW = "attention.sliding_window"
# Keys that only this architecture reads.
READS = (
    *(_WINDOW, f"{_WINDOW}_pattern", "attention.shared_kv_layers", "final_logit_softcapping"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
    *("rope.freq_base_swa", "embedding_length_per_layer_input"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
)
_NEVER = 1e20  # what divides the frequency of a pair that does not turn, at least


def build(keys: Keys) -> dict[str, Any]:
    """What it adds to the widths."""
    count = keys.num_layers
    mixers = sharing(_mixers(keys), keys.whole("attention.shared_kv_layers", limit=count))
    inputs = keys.whole("embedding_length_per_layer_input")
    cap = "final_logit_softcapping"
    return {
        "pattern": tuple(map(LayerSpec, mixers, _ffns(keys))),
        "post_norms": True,
        "logit_cap": keys.number(cap) if keys.has(cap) else None,
        "embedding_scale": keys.integer("embedding_length") ** 0.5,
        "layer_inputs": LayerInputs(inputs) if inputs else None,
        "has_layer_scales": True,
    }


def _mixers(keys: Keys) -> list[Attention]:
    """Before any of them shares."""
    heads = keys.integer("attention.head_count")
    own: dict[str, Any] = {"qk_norm": "head", "has_value_norm": True, "scale": 1.0}
    kv_heads = keys.integers("attention.head_count_kv", keys.num_layers)
    slides = keys.booleans(f"{_WINDOW}_pattern", keys.num_layers)
    if slides is None:
        raise InputError(f"metadata {keys.family}.{_WINDOW}_pattern is missing")
    near = Rope(keys.number("rope.freq_base_swa", 10_000.0))
    near_width = keys.integer("attention.key_length_swa", keys.head_width)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if keys.integer(key, near_width) != near_width:
            raise InputError(f"{keys.family}.{key} differs from the head width {near_width}")
    far, found = _distant(keys), []
    for layer, (slide, kv) in enumerate(zip(slides, kv_heads, strict=True)):
        if slide:
            window = keys.integer(_WINDOW)
            found.append(Attention(heads, kv, near_width, near, window, **own))
        else:
            has_values = keys.has_tensor(f"blk.{layer}.attn_v.weight")
            full = Attention(heads, kv, keys.head_width, far, **own)
            found.append(dataclasses.replace(full, has_values=has_values))
    return found


def _distant(keys: Keys) -> Rope:
    """Positions where there is no window: a file says by a divisor of each frequency which pairs
    turn.
    """
    theta = keys.number("rope.freq_base", 1_000_000.0)
    entry = keys.header.tensors.get(ROPE_FACTORS)
    if entry is None:
        raise InputError(f"tensor {ROPE_FACTORS!r} is missing")
    pairs = keys.head_width // 2
    if entry.shape != (pairs,):
        raise InputError(f"{ROPE_FACTORS!r} is {list(entry.shape)}; expected [{pairs}]")
    divisors = gguf_file.read_numbers(keys.header, ROPE_FACTORS)
    turning = int((divisors == 1).sum())
    if not turning or not np.array_equal(divisors == 1, np.arange(pairs) < turning) or (
        divisors[turning:] < _NEVER
    ).any():  # fmt: skip
        raise InputError(
            f"{ROPE_FACTORS!r} is not supported: pairs that turn come first, with divisors of 1"
        )
    return Rope(theta, Proportional(turning / pairs))


def _ffns(keys: Keys) -> list[FeedForward]:
    widths = keys.integers("feed_forward_length", keys.num_layers)
    if not keys.whole("expert_count"):
        return [Gated(width, "gelu_tanh") for width in widths]
    experts = Experts(
        keys.integer("expert_count"),
        keys.integer("expert_used_count"),
        keys.integer("expert_feed_forward_length"),
        Router(has_norm=True, has_factors=True),
        shared_width=widths[0],
        activation="gelu_tanh",
        has_norms=True,
    )
    return [dataclasses.replace(experts, shared_width=width) for width in widths]
