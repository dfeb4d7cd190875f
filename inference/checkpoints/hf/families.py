"""Architectures of `config.json` as `ModelConfig`s, a builder each; docs/add_a_model.md."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from configs.errors import InputError, shown
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
    config = family.build(keys, name)
    for layer in config.pattern:
        if layer.rope is not None:
            layer.rope.rotating(config.head_width)
    return config


def _llama(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "llama"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(rope=rope),),
        biases=_biases(keys),
    )


def _gemma3(keys: Keys, name: str) -> ModelConfig:
    per_kind = keys.nested("rope_parameters") or Keys({})
    distant, near = (per_kind.nested(f"{kind}_attention") for kind in ("full", "sliding"))
    older = keys.nested("rope_scaling")
    if older is not None:  # it is of the layers without a window
        distant = Keys((distant.raw if distant else {}) | older.raw, older.label)
    kinds = {
        "full_attention": LayerSpec(
            rope=rope_keys.scaled(keys, distant, keys.number("rope_theta", 1_000_000.0))
        ),
        "sliding_attention": LayerSpec(
            rope=rope_keys.scaled(keys, near, keys.number("rope_local_base_freq", 10_000.0)),
            window=keys.integer("sliding_window", 4096),
        ),
    }
    period = keys.integer("sliding_window_pattern", 6, limit=MOST_LAYERS)
    repeated = (*["sliding_attention"] * (period - 1), "full_attention")
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma3"),
        pattern=_shortest(_kinds(keys, kinds, repeated)),
        qk_norm="head",
        score_cap=keys.optional_number("attn_logit_softcapping"),
        logit_cap=keys.optional_number("final_logit_softcapping"),
    )


def _gemma2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    window = keys.optional_integer("sliding_window", 4096)
    kinds = {
        "sliding_attention": LayerSpec(rope=rope, window=window),
        "full_attention": LayerSpec(rope=rope),
    }
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma2"),
        pattern=_shortest(_kinds(keys, kinds, tuple(kinds))),
        score_cap=keys.optional_number("attn_logit_softcapping", 50.0),
        logit_cap=keys.optional_number("final_logit_softcapping", 30.0),
    )


def _mistral(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    keys.require_neutral({"layer_types": (None,)})  # Ministral's, which alternates windows
    return ModelConfig(
        **_llama_fields(keys, name, "mistral"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(rope=rope, window=keys.optional_integer("sliding_window", 4096)),),
    )


def _qwen2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "qwen2"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_upper_windows(keys, rope),
        biases=("qkv",),
    )


def _qwen3(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **_llama_fields(keys, name, "qwen3", head_width=128),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_upper_windows(keys, rope),
        qk_norm="head",
        biases=_biases(keys),
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
    has_window = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window") if has_window else None
    windows = {"full_attention": LayerSpec(), "sliding_attention": LayerSpec(window=window)}
    own = ["full_attention" if turns else "sliding_attention" for turns in rotates]
    return ModelConfig(
        **_llama_fields(keys, name, "smollm3", tied=True),
        max_context=rope_keys.max_context(keys, rope),
        pattern=_shortest(
            [
                dataclasses.replace(kind, rope=rope if turns else None)
                for kind, turns in zip(_kinds(keys, windows, own), rotates, strict=True)
            ]
        ),
        biases=_biases(keys),
    )


def _phi3(keys: Keys, name: str) -> ModelConfig:
    rope = _phi3_rope(Keys({"original_max_position_embeddings": 4096} | keys.raw, keys.label))
    return ModelConfig(
        **_llama_fields(keys, name, "phi3", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(rope=rope, window=keys.optional_integer("sliding_window")),),
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
        pattern=(LayerSpec(rope=rope),),
        qk_norm="all",
        pre_norms=False,
        post_norms=True,
        biases=_biases(keys),
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
    return ModelConfig(
        name=name,
        family="gpt2",
        vocab_size=keys.integer("vocab_size", 50257),
        width=width,
        ffn_width=keys.integer("n_inner", 4 * width),
        num_layers=keys.integer("n_layer", 12, limit=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=width // num_heads,
        max_context=positions,
        pattern=(LayerSpec(ffn="plain", rope=None),),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        biases=("qkv", "out", "ffn"),
        activation=keys.choice("activation_function", _GELU_TANH, "gelu_new"),
        learned_positions=positions,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _llama_fields(
    keys: Keys, name: str, family: str, head_width: int | None = None, tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:  # fmt: skip
    """What all of Llama's relatives write alike; the defaults are those of their transformers
    classes.
    """
    width, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    return {
        "name": name,
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "width": width,
        "ffn_width": keys.integer("intermediate_size"),
        "num_layers": keys.integer("num_hidden_layers", limit=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_width": keys.integer("head_dim", head_width or max(width // num_heads, 1)),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "activation": keys.choice("hidden_act", {"silu": "silu"}, "silu"),
        "tied": keys.boolean("tie_word_embeddings", tied),
    }


def _gemma_fields(keys: Keys, name: str, family: str) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    without_act = Keys({k: v for k, v in keys.raw.items() if k != "hidden_act"}, keys.label)
    fields = _llama_fields(without_act, name, family, head_width=256, tied=True)
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    return fields | {
        "max_context": keys.integer("max_position_embeddings"),
        "norm_offset": 1.0,
        "post_norms": True,
        "activation": keys.choice("hidden_activation", _GELU_TANH, "gelu_pytorch_tanh"),
        "attention_scale": None if scalar == fields["head_width"] else scalar**-0.5,
        "embedding_scale": fields["width"] ** 0.5,
        "biases": _biases(keys),
    }


def _biases(keys: Keys) -> tuple[str, ...]:
    """`attention_bias` means all four projections, `mlp_bias` all three."""
    attention = ("qkv", "out") if keys.boolean("attention_bias", False) else ()
    return attention + (("ffn",) if keys.boolean("mlp_bias", False) else ())


def _upper_windows(keys: Keys, rope: Rope) -> tuple[LayerSpec, ...]:
    """Qwen's rule: where windows are used at all, layers from `max_window_layers` on have one."""
    is_used = keys.boolean("use_sliding_window", False)
    window = keys.optional_integer("sliding_window", 4096) if is_used else None
    kinds = {
        "full_attention": LayerSpec(rope=rope),
        "sliding_attention": LayerSpec(rope=rope, window=window),
    }
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    full = keys.whole("max_window_layers", 28, limit=MOST_LAYERS)
    repeated = [
        "full_attention" if layer < full else "sliding_attention" for layer in range(layers)
    ]
    return _shortest(_kinds(keys, kinds, repeated))


def _kinds(keys: Keys, kinds: Mapping[str, LayerSpec], repeated: Sequence[str]) -> list[LayerSpec]:
    """Every layer by `layer_types`, or by names that repeat where the file lists none."""
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    names = keys.listed("layer_types", layers)
    for kind in names or ():
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(kinds)}"
            )
    names = names or [repeated[layer % len(repeated)] for layer in range(layers)]
    return [kinds[kind] for kind in names]


def _shortest(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The pattern that repeats, by its longest border (Knuth, Morris & Pratt 1977): a file may list
    thousands of layers.
    """
    borders = [0]
    for layer in layers[1:]:
        border = borders[-1]
        while border and layer != layers[border]:
            border = borders[border - 1]
        borders.append(border + (layer == layers[border]))
    return tuple(layers[: len(layers) - borders[-1]])


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
