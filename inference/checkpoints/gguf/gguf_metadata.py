"""The metadata of a `.gguf` file as a `ModelConfig`, a builder an architecture.

llama.cpp stores what its own code does not know; the rest (which layers have a window, which do not
rotate) stands here as it stands there.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.kind import MOST_WIDTH
from configs.kinds.rope import Linear, Llama3, LongRope, Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.gguf import gguf_file
from inference.checkpoints.gguf.gguf_file import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from inference.checkpoints.gguf.gguf_scan import Header
from layers import rope as rope_math

# The one size of a family whose queries are scaled by D / N instead of H, by its layers.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62

# Keys that are understood below or say nothing about the mathematics. Any other is refused.
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip


def read_config(header: Header) -> ModelConfig:
    """The model a file describes.

    Raises:
        InputError: another architecture, a missing key, or a key that changes the model and is not
            understood.
    """
    try:
        return _build(header)
    except ValueError as error:
        raise InputError(f"{header.path}: {error}") from None


def _build(header: Header) -> ModelConfig:
    name = header.metadata.get("general.architecture")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise InputError(
            f"architecture {shown(name)} is not supported; valid: {', '.join(FAMILIES)}"
        )
    assert isinstance(name, str)
    keys = _Keys(header, name)
    keys.refuse_unknown(_KNOWN_KEYS.union(family.reads))
    return ModelConfig(**_widths(keys, family) | family.build(keys))


class _Keys:
    """An architecture's metadata, read by type."""

    def __init__(self, header: Header, family: str):
        self.header = header
        self.family = family

    def refuse_unknown(self, known: set[str]) -> None:
        prefix = f"{self.family}."
        for key in self.header.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                raise InputError(f"metadata {shown(key)} is not supported")

    def get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.header.metadata.get(f"{self.family}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all equal
        if value is None:
            raise InputError(f"metadata {self.family}.{key!s} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InputError(f"metadata {self.family}.{key} must be one {kinds[0].__name__}")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = MOST_WIDTH) -> int:
        value = self.get(key, (int,), default)
        if not 1 <= value <= limit:
            raise InputError(f"metadata {self.family}.{key} must be 1 to {limit}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        # Stored in float32: the shortest decimal that rounds to it is the number that was meant.
        value = float(str(np.float32(self.get(key, (float, int), default))))
        if not 0 < value < math.inf:
            raise InputError(f"metadata {self.family}.{key} must be positive, not {value}")
        return value

    def text(self, key: str, default: str) -> str:
        return self.get(key, (str,), default)

    @property
    def head_width(self) -> int:
        heads = max(self.integer("embedding_length") // self.integer("attention.head_count"), 1)
        return self.integer("attention.key_length", heads)

    def attention(self, rope: Rope | None, **own: Any) -> Attention:
        """Heads as every architecture writes them, and what one adds."""
        num_heads = self.integer("attention.head_count")
        num_kv_heads = self.integer("attention.head_count_kv", num_heads)
        return Attention(num_heads, num_kv_heads, self.head_width, rope, **own)

    def layer(self, rope: Rope | None, **own: Any) -> LayerSpec:
        """A layer of Llama's and most others': attention, and a gated feed-forward."""
        return LayerSpec(self.attention(rope, **own), Gated(self.ffn_width))

    @property
    def ffn_width(self) -> int:
        return self.integer("feed_forward_length")


class _Family(NamedTuple):
    """How an architecture is read: what it adds to the widths, the keys only it has, and whether a
    part of each head may rotate.
    """

    build: Callable[[_Keys], dict[str, Any]]
    reads: tuple[str, ...] = ()
    partial: bool = False


def _widths(keys: _Keys, family: _Family) -> dict[str, Any]:
    head_width = keys.head_width
    fixed = ("attention.value_length",) + (() if family.partial else ("rope.dimension_count",))
    for key in fixed:
        if keys.integer(key, head_width) != head_width:
            raise InputError(f"{keys.family}.{key} differs from the head width {head_width}")
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor 'token_embd.weight' is missing")
    name = keys.header.metadata.get("general.name")
    epsilon = "attention.layer_norm_rms_epsilon"
    if "attention.layer_norm_epsilon" in family.reads:
        epsilon = "attention.layer_norm_epsilon"
    return {
        "name": name if isinstance(name, str) else keys.header.path.stem,
        "family": keys.family,
        "vocab_size": embedding.shape[0],
        "width": keys.integer("embedding_length"),
        "num_layers": keys.integer("block_count", limit=MOST_LAYERS),
        "max_context": keys.integer("context_length"),
        "norm_eps": keys.number(epsilon),
        "tied": "output.weight" not in keys.header.tensors,
    }


def _rope(keys: _Keys, key: str = "rope.freq_base", default: float = 10_000.0) -> Rope:
    theta, scaling = keys.number(key, default), keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise InputError(f"rope scaling {shown(scaling)} is not supported; valid: none, linear")
    factor = keys.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    return Rope(theta) if factor == 1.0 else Rope(theta, Linear(factor))


def _llama(keys: _Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(_llama_rope(keys)),)}


def _llama_rope(keys: _Keys) -> Rope:
    rope = _rope(keys)
    entry = keys.header.tensors.get(ROPE_FACTORS)
    if entry is None:
        return rope
    # Llama 3.1 and later store the divisor of each frequency instead of the rule that made it.
    plain = rope_math.inverse_frequencies(rope, keys.head_width)
    if entry.shape != plain.shape:
        raise InputError(f"{ROPE_FACTORS!r} is {list(entry.shape)}; expected {list(plain.shape)}")
    divisors = gguf_file.read_numbers(keys.header, ROPE_FACTORS)
    context = keys.integer("rope.scaling.original_context_length", Llama3(1.0).original_context)
    candidate = Rope(rope.theta, Llama3(float(divisors.max()), original_context=context))
    expected = plain / rope_math.inverse_frequencies(candidate, keys.head_width)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise InputError(f"{ROPE_FACTORS!r} does not follow the llama3 rule")
    return candidate


def _smollm3(keys: _Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(_rope(keys)),) * 3 + (keys.layer(None),)}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(_rope(keys), biases=("qkv",)),)}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(_rope(keys), qk_norm="head"),)}


def _olmo2(keys: _Keys) -> dict[str, Any]:
    layer = keys.layer(_rope(keys), qk_norm="all")
    return {"pattern": (layer,), "pre_norms": False, "post_norms": True}


def _gemma(keys: _Keys, pattern: Sequence[Attention], layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; the largest of each scales queries by the width that falls to a
    head.
    """
    width = keys.integer("embedding_length")
    is_27b = keys.integer("block_count", limit=MOST_LAYERS) == layers_of_27b
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


def _gemma2(keys: _Keys) -> dict[str, Any]:
    full = keys.attention(_rope(keys), score_cap=keys.number("attn_logit_softcapping", 50.0))
    local = dataclasses.replace(full, window=keys.integer("attention.sliding_window", 4096))
    cap = keys.number("final_logit_softcapping", 30.0)
    return _gemma(keys, (local, full), _GEMMA2_27B_LAYERS) | {"logit_cap": cap}


def _gemma3(keys: _Keys) -> dict[str, Any]:
    period = keys.integer("attention.sliding_window_pattern", 6)
    near = Rope(keys.number("rope.freq_base_swa", 10_000.0))
    window = keys.integer("attention.sliding_window")
    local = keys.attention(near, window=window, qk_norm="head")
    distant = keys.attention(_rope(keys, default=1_000_000.0), qk_norm="head")
    return _gemma(keys, [local] * (period - 1) + [distant], _GEMMA3_27B_LAYERS)


def _phi3(keys: _Keys) -> dict[str, Any]:
    rope, head_width = _rope(keys), keys.head_width
    share = keys.integer("rope.dimension_count", head_width) / head_width
    window = keys.get("attention.sliding_window", (int,), 0)  # 0 where there is none
    scaling = None
    if LONG_FACTORS in keys.header.tensors and SHORT_FACTORS in keys.header.tensors:
        short, long = (
            gguf_file.read_numbers(keys.header, name) for name in (SHORT_FACTORS, LONG_FACTORS)
        )
        scaling = LongRope(
            tuple(short.tolist()),
            tuple(long.tolist()),
            keys.integer("rope.scaling.original_context_length"),
            keys.number("rope.scaling.attn_factor", 1.0),
        )
    rope = Rope(rope.theta, scaling or rope.scaling, share)
    own = keys.integer("attention.sliding_window") if window else None
    return {"pattern": (keys.layer(rope, window=own),)}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    positions = keys.header.tensors.get("position_embd.weight")
    if positions is None:
        raise InputError("tensor 'position_embd.weight' is missing")
    attention = keys.attention(None, biases=("qkv", "out"))
    ffn = Plain(keys.ffn_width, "gelu_tanh", has_bias=True)
    return {
        "pattern": (LayerSpec(attention, ffn),),
        "norm": "layer",
        "learned_positions": positions.shape[0],
    }


_WINDOW = "attention.sliding_window"
FAMILIES = {
    "llama": _Family(_llama),
    "gemma3": _Family(_gemma3, (_WINDOW, f"{_WINDOW}_pattern", "rope.freq_base_swa")),
    "gemma2": _Family(_gemma2, (_WINDOW, "attn_logit_softcapping", "final_logit_softcapping")),
    "gpt2": _Family(_gpt2, ("attention.layer_norm_epsilon",)),
    "qwen2": _Family(_qwen2),
    "qwen3": _Family(_qwen3),
    "smollm3": _Family(_smollm3),
    "olmo2": _Family(_olmo2),
    "phi3": _Family(_phi3, (_WINDOW, "rope.scaling.attn_factor"), partial=True),
}
