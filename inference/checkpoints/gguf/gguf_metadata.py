"""The metadata of a `.gguf` file as a `ModelConfig`, a builder an architecture.

llama.cpp stores what its own code does not know; the rest (which layers have a window, which do not
rotate) stands here as it stands there.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Llama3, LongRope, Rope
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints.gguf import gguf_file, gguf_gemma4, gguf_mixtures
from inference.checkpoints.gguf.gguf_keys import YARN, Keys
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.gguf.states import gguf_states
from inference.checkpoints.gguf.tensor_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from layers import rope as rope_math

# The one size of a family whose queries are scaled by D / N instead of H, by its layers.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62

_WINDOW, _ROTATING = "attention.sliding_window", "rope.dimension_count"
_WIDTHS = ("attention.value_length", _ROTATING)  # of a head
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
    keys = Keys(header, name)
    keys.refuse_unknown(_KNOWN_KEYS.union(family.reads))
    return ModelConfig(**_widths(keys, family) | family.build(keys))


class _Family(NamedTuple):
    """How an architecture is read: what it adds to the widths, the keys only it has, and those of
    the head's widths that may differ from it.
    """

    build: Callable[[Keys], dict[str, Any]]
    reads: tuple[str, ...] = ()
    free: tuple[str, ...] = ()


def _widths(keys: Keys, family: _Family) -> dict[str, Any]:
    head_width = keys.head_width
    for key in ("attention.value_length", _ROTATING):
        if key not in family.free and keys.integer(key, head_width) != head_width:
            raise InputError(f"{keys.family}.{key} differs from the head width {head_width}")
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor 'token_embd.weight' is missing")
    name = keys.header.metadata.get("general.name")
    epsilon = "attention.layer_norm_rms_epsilon"
    if not keys.has(epsilon) and "attention.layer_norm_epsilon" in family.reads:
        epsilon = "attention.layer_norm_epsilon"
    return {
        "name": name if isinstance(name, str) else keys.header.path.stem,
        "family": keys.family,
        "vocab_size": embedding.shape[0],
        "width": keys.integer("embedding_length"),
        "num_layers": keys.num_layers,
        "max_context": keys.integer("context_length"),
        "norm_eps": keys.number(epsilon),
        "tied": "output.weight" not in keys.header.tensors,
    }


def _llama(keys: Keys) -> dict[str, Any]:
    """Llama and, with experts, Mixtral."""
    if keys.whole("expert_count"):
        return gguf_mixtures.mixtral(keys)
    return {"pattern": (keys.layer(_llama_rope(keys)),)}


def _llama_rope(keys: Keys) -> Rope:
    rope = keys.rope()
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


def _smollm3(keys: Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(keys.rope()),) * 3 + (keys.layer(None),)}


def _qwen2(keys: Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(keys.rope(), biases=("qkv",)),)}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return {"pattern": (keys.layer(keys.rope(), qk_norm="head"),)}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2 and, with windows, in whose layers no position is stretched, OLMo 3."""
    distant = keys.layer(keys.rope(has_yarn=True), qk_norm="all")
    own = {"pattern": (distant,), "pre_norms": False, "post_norms": True}
    if not keys.has(_WINDOW):
        return own
    slides = keys.booleans(f"{_WINDOW}_pattern", keys.num_layers) or (True, True, True, False)
    near = Rope(keys.number("rope.freq_base", 10_000.0))
    local = keys.layer(near, qk_norm="all", window=keys.integer(_WINDOW))
    pattern = tuple(local if slide else distant for slide in slides)
    return own | {"family": "olmo3", "pattern": pattern}


def _gemma(keys: Keys, pattern: Sequence[Attention], layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share; the largest of each scales queries by the width that falls to a
    head.
    """
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


def _gemma2(keys: Keys) -> dict[str, Any]:
    full = keys.attention(keys.rope(), score_cap=keys.number("attn_logit_softcapping", 50.0))
    local = dataclasses.replace(full, window=keys.integer("attention.sliding_window", 4096))
    cap = keys.number("final_logit_softcapping", 30.0)
    return _gemma(keys, (local, full), _GEMMA2_27B_LAYERS) | {"logit_cap": cap}


def _gemma3(keys: Keys) -> dict[str, Any]:
    period = keys.integer("attention.sliding_window_pattern", 6)
    near = Rope(keys.number("rope.freq_base_swa", 10_000.0))
    window = keys.integer("attention.sliding_window")
    local = keys.attention(near, window=window, qk_norm="head")
    distant = keys.attention(keys.rope(default=1_000_000.0), qk_norm="head")
    return _gemma(keys, [local] * (period - 1) + [distant], _GEMMA3_27B_LAYERS)


def _phi3(keys: Keys) -> dict[str, Any]:
    rope, head_width = keys.rope(), keys.head_width
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


def _gpt2(keys: Keys) -> dict[str, Any]:
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


FAMILIES = {
    "llama": _Family(_llama, gguf_mixtures.COUNTS),
    "gemma3": _Family(_gemma3, (_WINDOW, f"{_WINDOW}_pattern", "rope.freq_base_swa")),
    "gemma2": _Family(_gemma2, (_WINDOW, "attn_logit_softcapping", "final_logit_softcapping")),
    "gpt2": _Family(_gpt2, ("attention.layer_norm_epsilon",)),
    "qwen2": _Family(_qwen2),
    "qwen3": _Family(_qwen3),
    "smollm3": _Family(_smollm3),
    "olmo2": _Family(_olmo2, (*YARN, _WINDOW, f"{_WINDOW}_pattern")),
    "phi3": _Family(_phi3, (_WINDOW, "rope.scaling.attn_factor"), free=(_ROTATING,)),
    "qwen2moe": _Family(gguf_mixtures.qwen2_moe, gguf_mixtures.ROUTED),
    "qwen3moe": _Family(gguf_mixtures.qwen3_moe, gguf_mixtures.ROUTED),
    "olmoe": _Family(gguf_mixtures.olmoe, gguf_mixtures.ROUTED),
    "deepseek2": _Family(gguf_mixtures.deepseek, gguf_mixtures.LATENT, _WIDTHS),
    "dots1": _Family(gguf_mixtures.dots1, gguf_mixtures.DOTS1),
    "minimax-m2": _Family(gguf_mixtures.minimax_m2, gguf_mixtures.ROUTED, (_ROTATING,)),
    "glm4moe": _Family(gguf_mixtures.glm4_moe, gguf_mixtures.GLM4, (_ROTATING,)),
    "gemma4": _Family(gguf_gemma4.build, gguf_gemma4.READS),
    "gpt-oss": _Family(gguf_mixtures.gpt_oss, (*gguf_mixtures.ROUTED, *YARN, _WINDOW)),
    "mamba": _Family(gguf_states.mamba, gguf_states.MAMBA, _WIDTHS),
    "mamba2": _Family(gguf_states.mamba2, gguf_states.MAMBA2, _WIDTHS),
    "jamba": _Family(gguf_states.jamba, gguf_states.JAMBA),
    "lfm2": _Family(gguf_states.lfm2, gguf_states.LFM2),
    "falcon-h1": _Family(gguf_states.falcon_h1, gguf_states.MAMBA2),
    "granitehybrid": _Family(gguf_states.granite, gguf_states.GRANITE),
    "nemotron_h": _Family(gguf_states.nemotron, gguf_states.NEMOTRON, (_ROTATING,)),
    "nemotron_h_moe": _Family(gguf_states.nemotron, gguf_states.NEMOTRON, (_ROTATING,)),
}
