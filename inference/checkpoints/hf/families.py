"""Architectures of `config.json` as `ModelConfig`s, a builder each; docs/add_a_model.md."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf import rope_keys
from inference.checkpoints.hf.config_keys import Keys

_GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that change the mathematics, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (False, None),
    "auto_map": (None,),
}


class Family(NamedTuple):
    """How an architecture is read.

    Attributes:
        name: of the family, which selects its name map.
        build: (keys, the model's name) -> its configuration.
        reads: of the keys that are refused elsewhere, those that `build` understands.
    """

    name: str
    build: Callable[[Keys, str], ModelConfig]
    reads: tuple[str, ...] = ()


def build(keys: Keys, name: str) -> ModelConfig:
    """The model that a configuration describes.

    Raises:
        InputError: an unknown architecture, or a key that is unsound or changes the model in a way
            that is not supported.
    """
    architectures = keys.raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    family = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        valid = ", ".join(ARCHITECTURES)
        raise InputError(f"architecture {shown(architecture)} is not supported; valid: {valid}")
    keys.require_neutral(_NEUTRAL, except_for=family.reads)
    return family.build(keys, name)


def _llama(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "llama"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(_attention(keys, rope=rope), _gated(keys)),),
    )


def _gemma3(keys: Keys, name: str) -> ModelConfig:
    per_kind = keys.nested("rope_parameters") or Keys({})
    distant, near = (per_kind.nested(f"{kind}_attention") for kind in ("full", "sliding"))
    older = keys.nested("rope_scaling")
    if older is not None:  # it is of the layers without a window
        distant = Keys((distant.raw if distant else {}) | older.raw, older.label)
    # transformers never applies the family's `attn_logit_softcapping`
    heads = _attention(keys, 256, qk_norm="head", scale=_gemma_scale(keys))
    far = rope_keys.scaled(keys, distant, keys.number("rope_theta", 1_000_000.0))
    close = rope_keys.scaled(keys, near, keys.number("rope_local_base_freq", 10_000.0))
    window = keys.integer("sliding_window", 4096)
    full = dataclasses.replace(heads, rope=far)
    sliding = dataclasses.replace(heads, rope=close, window=window)
    period = keys.integer("sliding_window_pattern", 6, limit=MOST_LAYERS)
    repeated = _types(layer < period - 1 for layer in range(period))
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma3"),
        pattern=_pattern(_by_type(keys, full, sliding, repeated), _gemma_ffn(keys)),
        logit_cap=keys.optional_number("final_logit_softcapping"),
    )


def _gemma2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    cap = keys.optional_number("attn_logit_softcapping", 50.0)
    full = _attention(keys, 256, rope=rope, scale=_gemma_scale(keys), score_cap=cap)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window", 4096))
    repeated = _types((True, False))
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma2"),
        pattern=_pattern(_by_type(keys, full, sliding, repeated), _gemma_ffn(keys)),
        logit_cap=keys.optional_number("final_logit_softcapping", 30.0),
    )


def _mistral(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    keys.require_neutral({"layer_types": (None,)})  # Ministral's, which alternates windows
    window = keys.optional_integer("sliding_window", 4096)
    attention = _attention(keys, rope=rope, window=window)
    return ModelConfig(
        **_llama_fields(keys, name, "mistral"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(attention, _gated(keys)),),
    )


def _qwen2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "qwen2"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_upper_windows(keys, _attention(keys, rope=rope, biases=("qkv",))),
    )


def _qwen3(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "qwen3"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_upper_windows(keys, _attention(keys, 128, rope=rope, qk_norm="head")),
    )


def _smollm3(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys, 2_000_000.0)
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    period = keys.integer("no_rope_layer_interval", 4)
    rotates = keys.listed("no_rope_layers", layers)  # 1 where a layer does, despite the name
    if rotates is None:
        rotates = [int((layer + 1) % period != 0) for layer in range(layers)]
    if any(value not in (0, 1) for value in rotates):
        raise InputError(
            "no_rope_layers lists 1 for a layer that rotates and 0 for one that does not"
        )
    # `use_sliding_window` chooses the kinds where the file lists none; listed ones mask regardless.
    has_windows = keys.boolean("use_sliding_window", False)
    full = _attention(keys, rope=None)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window"))
    own = _types(has_windows and not turns for turns in rotates)
    mixers = zip(_by_type(keys, full, sliding, own), rotates, strict=True)
    return ModelConfig(
        **_llama_fields(keys, name, "smollm3", tied=True),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_pattern(
            [dataclasses.replace(mixer, rope=rope if turns else None) for mixer, turns in mixers],
            _gated(keys),
        ),
    )


def _phi3(keys: Keys, name: str) -> ModelConfig:
    rope = _phi3_rope(Keys({"original_max_position_embeddings": 4096} | keys.raw, keys.label))
    attention = _attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    return ModelConfig(
        **_llama_fields(keys, name, "phi3", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(attention, _gated(keys)),),
    )


def _phi3_rope(keys: Keys) -> Rope:
    """A share of each head rotates; 'su' and 'yarn' are longrope's names in older files."""
    own = rope_keys.described(keys)
    share, theta = keys.number("partial_rotary_factor", 1.0), keys.number("rope_theta", 10_000.0)
    if own is not None:
        share = own.number("partial_rotary_factor", share)
        kind = own.raw.get("rope_type", own.raw.get("type"))
        kind = "longrope" if kind in ("su", "yarn") else kind
        own = Keys(own.raw | {"rope_type": kind, "partial_rotary_factor": None}, own.label)
    return dataclasses.replace(rope_keys.scaled(keys, own, theta), share=share)


def _olmo2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "olmo2", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(_attention(keys, rope=rope, qk_norm="all"), _gated(keys)),),
        pre_norms=False,
        post_norms=True,
    )


def _gpt2(keys: Keys, name: str) -> ModelConfig:
    keys.require_neutral(
        {
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        }
    )
    width, num_heads = keys.integer("n_embd", 768), keys.integer("n_head", 12)
    if width % num_heads:
        raise InputError(f"n_embd={width} is not a multiple of n_head={num_heads}")
    positions = keys.integer("n_positions", 1024)
    attention = Attention(
        num_heads, num_heads, width // num_heads, rope=None, biases=("qkv", "out")
    )
    activation = keys.choice("activation_function", _GELU_TANH, "gelu_new")
    ffn = Plain(keys.integer("n_inner", 4 * width), activation, has_bias=True)
    return ModelConfig(
        name=name,
        family="gpt2",
        vocab_size=keys.integer("vocab_size", 50257),
        width=width,
        num_layers=keys.integer("n_layer", 12, limit=MOST_LAYERS),
        max_context=positions,
        pattern=(LayerSpec(attention, ffn),),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        learned_positions=positions,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _llama_fields(
    keys: Keys, name: str, family: str, tied: bool = False, eps: float = 1e-6
) -> dict[str, Any]:
    """What all of Llama's relatives write alike; the defaults are those of their transformers
    classes.
    """
    return {
        "name": name,
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "width": keys.integer("hidden_size"),
        "num_layers": keys.integer("num_hidden_layers", limit=MOST_LAYERS),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "tied": keys.boolean("tie_word_embeddings", tied),
    }


def _attention(keys: Keys, head_width: int | None = None, **own: Any) -> Attention:
    """Heads and biases as all of Llama's relatives write them, and what a family adds."""
    num_heads = keys.integer("num_attention_heads")
    width = head_width or max(keys.integer("hidden_size") // num_heads, 1)
    has_bias = keys.boolean("attention_bias", False)  # of all four projections
    fields = {
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_width": keys.integer("head_dim", width),
        "biases": ("qkv", "out") if has_bias else (),
    }
    return Attention(**fields | own)


def _gated(keys: Keys) -> Gated:
    """The feed-forward of all of Llama's relatives; `mlp_bias` means all three projections."""
    return Gated(
        keys.integer("intermediate_size"),
        keys.choice("hidden_act", {"silu": "silu"}, "silu"),
        keys.boolean("mlp_bias", False),
    )


def _gemma_fields(keys: Keys, name: str, family: str) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    fields = _llama_fields(keys, name, family, tied=True)
    return fields | {
        "max_context": keys.integer("max_position_embeddings"),
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": fields["width"] ** 0.5,
    }


def _gemma_ffn(keys: Keys) -> Gated:
    activation = keys.choice("hidden_activation", _GELU_TANH, "gelu_pytorch_tanh")
    return Gated(keys.integer("intermediate_size"), activation)


def _gemma_scale(keys: Keys) -> float | None:
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    return None if scalar == keys.integer("head_dim", 256) else scalar**-0.5


def _upper_windows(keys: Keys, full: Attention) -> tuple[LayerSpec, ...]:
    """Qwen's rule: where windows are used at all, layers from `max_window_layers` on have one."""
    is_used = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window", 4096) if is_used else None
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    first = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    repeated = _types(layer >= first for layer in range(layers))
    sliding = dataclasses.replace(full, window=window)
    return _pattern(_by_type(keys, full, sliding, repeated), _gated(keys))


def _types(slides: Iterable[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _by_type(
    keys: Keys, full: Attention, sliding: Attention, repeated: Sequence[str]
) -> list[Attention]:
    """Every layer by `layer_types`, or by names that repeat where the file lists none."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    names = keys.listed("layer_types", layers)
    for kind in names or ():
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(kinds)}"
            )
    names = names or [repeated[layer % len(repeated)] for layer in range(layers)]
    return [kinds[kind] for kind in names]


def _pattern(mixers: Sequence[Attention], ffn: Gated) -> tuple[LayerSpec, ...]:
    """The pattern that repeats, by its longest border (Knuth, Morris & Pratt 1977): a file may list
    thousands of layers.
    """
    borders = [0]
    for mixer in mixers[1:]:
        border = borders[-1]
        while border and mixer != mixers[border]:
            border = borders[border - 1]
        borders.append(border + (mixer == mixers[border]))
    return tuple(LayerSpec(mixer, ffn) for mixer in mixers[: len(mixers) - borders[-1]])


_BIASED = ("attention_bias", "mlp_bias")
_CAPPED = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, _BIASED),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3, ("attention_bias", *_CAPPED)),
    "GPT2LMHeadModel": Family("gpt2", _gpt2),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, ("attention_bias", *_CAPPED)),
    "MistralForCausalLM": Family("mistral", _mistral),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, ("attention_bias",)),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3, _BIASED),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, ("attention_bias",)),
    "Phi3ForCausalLM": Family("phi3", _phi3, ("partial_rotary_factor", "auto_map")),
}
