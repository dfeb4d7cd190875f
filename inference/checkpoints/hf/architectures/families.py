"""Architectures of `config.json` as `ModelConfig`s, a builder each; docs/add_a_model.md."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures import (
    fields,
    gemma4,
    mixtures,
    rope_keys,
)
from inference.checkpoints.hf.architectures.config_keys import Keys
from inference.checkpoints.hf.architectures.delta_rule import builders, kimi
from inference.checkpoints.hf.architectures.hybrids import lfm2, mamba2, minimax, nemotron
from inference.checkpoints.hf.architectures.scans import recurrent, selective

_GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that change the mathematics, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "rope_interleaved": (False, None),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (False, None),
    "auto_map": (None,),
    "mamba_ssm_dtype": ("float32", None),  # of states, which nothing here rounds
    "mamba_ssm_cache_dtype": ("float32", None),
}

_SUFFIX = "ForCausalLM"  # of nearly every architecture


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
    architecture = _architecture(keys.raw)
    family = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        valid = ", ".join(name.removesuffix(_SUFFIX) for name in ARCHITECTURES)
        raise InputError(
            f"architecture {shown(architecture)} is not supported; valid, with {_SUFFIX} behind "
            f"most of them: {valid}"
        )
    keys.require_neutral(_NEUTRAL, except_for=family.reads)
    return family.build(keys, name)


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """What describes the text of a model that reads images and sounds too, as if it stood alone;
    other configurations as they are.

    Raises:
        InputError: it describes no text.
    """
    architecture = _architecture(raw)
    alone = _WHOLES.get(architecture) if isinstance(architecture, str) else None
    if alone is None:
        return raw
    text = Keys(raw).nested("text_config")
    if text is None:
        raise InputError(f"architecture {architecture} has a text_config, which is missing")
    own = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    return text.raw | own | {"architectures": [alone[0]], "model_type": alone[1]}


def reads(raw: dict[str, Any], key: str) -> bool:
    """Whether the architecture of a configuration understands a key that is refused elsewhere."""
    architecture = _architecture(raw)
    family = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    return family is not None and key in family.reads


def _architecture(raw: dict[str, Any]) -> Any:
    architectures = raw.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None


def _llama(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **fields.llama_fields(keys, name, "llama"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(fields.attention(keys, rope=rope), fields.gated(keys)),),
    )


def _gemma3(keys: Keys, name: str) -> ModelConfig:
    distant, near = rope_keys.by_kind(keys)
    # transformers never applies the family's `attn_logit_softcapping`
    heads = fields.attention(keys, 256, qk_norm="head", scale=_gemma_scale(keys))
    far = rope_keys.scaled(keys, distant, keys.number("rope_theta", 1_000_000.0))
    close = rope_keys.scaled(keys, near, keys.number("rope_local_base_freq", 10_000.0))
    window = keys.integer("sliding_window", 4096)
    full = dataclasses.replace(heads, rope=far)
    sliding = dataclasses.replace(heads, rope=close, window=window)
    period = keys.integer("sliding_window_pattern", 6, limit=MOST_LAYERS)
    repeated = fields.types(layer < period - 1 for layer in range(period))
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma3"),
        pattern=fields.pattern(fields.by_type(keys, full, sliding, repeated), _gemma_ffn(keys)),
        logit_cap=keys.optional_number("final_logit_softcapping"),
    )


def _gemma2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    cap = keys.optional_number("attn_logit_softcapping", 50.0)
    full = fields.attention(keys, 256, rope=rope, scale=_gemma_scale(keys), score_cap=cap)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window", 4096))
    repeated = fields.types((True, False))
    return ModelConfig(
        **_gemma_fields(keys, name, "gemma2"),
        pattern=fields.pattern(fields.by_type(keys, full, sliding, repeated), _gemma_ffn(keys)),
        logit_cap=keys.optional_number("final_logit_softcapping", 30.0),
    )


def _mistral(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    keys.require_neutral({"layer_types": (None,)})  # Ministral's, which alternates windows
    window = keys.optional_integer("sliding_window", 4096)
    attention = fields.attention(keys, rope=rope, window=window)
    return ModelConfig(
        **fields.llama_fields(keys, name, "mistral"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(attention, fields.gated(keys)),),
    )


def _qwen2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **fields.llama_fields(keys, name, "qwen2"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.upper_windows(keys, fields.attention(keys, rope=rope, biases=("qkv",))),
    )


def _qwen3(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **fields.llama_fields(keys, name, "qwen3"),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.upper_windows(keys, fields.attention(keys, 128, rope=rope, qk_norm="head")),
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
    full = fields.attention(keys, rope=None)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window"))
    own = fields.types(has_windows and not turns for turns in rotates)
    mixers = zip(fields.by_type(keys, full, sliding, own), rotates, strict=True)
    return ModelConfig(
        **fields.llama_fields(keys, name, "smollm3", tied=True),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(
            [dataclasses.replace(mixer, rope=rope if turns else None) for mixer, turns in mixers],
            fields.gated(keys),
        ),
    )


def _phi3(keys: Keys, name: str) -> ModelConfig:
    rope = _phi3_rope(Keys({"original_max_position_embeddings": 4096} | keys.raw, keys.label))
    attention = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    return ModelConfig(
        **fields.llama_fields(keys, name, "phi3", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(attention, fields.gated(keys)),),
    )


def _phi3_rope(keys: Keys) -> Rope:
    """A share of each head rotates; 'su' and 'yarn' are longrope's names in older files."""
    own = rope_keys.described(keys)
    share, theta = keys.number("partial_rotary_factor", 1.0), keys.number("rope_theta", 10_000.0)
    if own is not None:
        share = own.number("partial_rotary_factor", share)
        kind = own.raw.get("rope_type", own.raw.get("type"))
        kind = "longrope" if kind in ("su", "yarn") else kind
        own = rope_keys.without_share(Keys(own.raw | {"rope_type": kind}, own.label))
    rope = rope_keys.scaled(rope_keys.without_share(keys), own, theta)
    return dataclasses.replace(rope, share=share)


def _olmo2(keys: Keys, name: str) -> ModelConfig:
    rope = rope_keys.read(keys)
    return ModelConfig(
        **fields.llama_fields(keys, name, "olmo2", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(fields.attention(keys, rope=rope, qk_norm="all"), fields.gated(keys)),),
        pre_norms=False,
        post_norms=True,
    )


def _olmo3(keys: Keys, name: str) -> ModelConfig:
    distant, near = rope_keys.by_kind(keys)
    theta = keys.number("rope_theta", 500_000.0)
    far, close = (rope_keys.scaled(keys, own, theta) for own in (distant, near))
    full = fields.attention(keys, rope=far, qk_norm="all")
    window = keys.optional_integer("sliding_window", 4096)
    sliding = dataclasses.replace(full, rope=close, window=window)
    repeated = fields.types((True, True, True, False))
    mixers = fields.by_type(keys, full, sliding, repeated)
    return ModelConfig(
        **fields.llama_fields(keys, name, "olmo3", eps=1e-5),
        max_context=rope_keys.max_context(keys, far),
        pattern=fields.pattern(mixers, fields.gated(keys)),
        pre_norms=False,
        post_norms=True,
    )


def _gpt2(keys: Keys, name: str) -> ModelConfig:
    keys.require_neutral({"add_cross_attention": (False, None)})
    width, num_heads = keys.integer("n_embd", 768), keys.integer("n_head", 12)
    if width % num_heads:
        raise InputError(f"n_embd={width} is not a multiple of n_head={num_heads}")
    positions = keys.integer("n_positions", 1024)
    attention = Attention(
        num_heads,
        num_heads,
        width // num_heads,
        rope=None,
        biases=("qkv", "out"),
        scale=None if keys.boolean("scale_attn_weights", True) else 1.0,
    )
    num_layers = keys.integer("n_layer", 12, limit=MOST_LAYERS)
    mixers = [attention] * num_layers
    if keys.boolean("scale_attn_by_inverse_layer_idx", False):
        scale = attention.scale or attention.head_width**-0.5
        mixers = [dataclasses.replace(attention, scale=scale / n) for n in range(1, num_layers + 1)]
    activation = keys.choice("activation_function", _GELU_TANH, "gelu_new")
    ffn = Plain(keys.integer("n_inner", 4 * width), activation, has_bias=True)
    return ModelConfig(
        name=name,
        family="gpt2",
        vocab_size=keys.integer("vocab_size", 50257),
        width=width,
        num_layers=num_layers,
        max_context=positions,
        pattern=fields.pattern(mixers, ffn),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        learned_positions=positions,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _gemma_fields(keys: Keys, name: str, family: str) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    own = fields.llama_fields(keys, name, family, tied=True)
    return own | {
        "max_context": keys.integer("max_position_embeddings"),
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": own["width"] ** 0.5,
    }


def _gemma_ffn(keys: Keys) -> Gated:
    activation = keys.choice("hidden_activation", _GELU_TANH, "gelu_pytorch_tanh")
    return Gated(keys.integer("intermediate_size"), activation)


def _gemma_scale(keys: Keys) -> float | None:
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    return None if scalar == keys.integer("head_dim", 256) else scalar**-0.5


# Models that read images and sounds too: architecture and type of their text alone.
_WHOLES = {
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", "gemma4_text"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
}
_OF_THE_WHOLE = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id"),
    *("quantization_config", "compression_config", "auto_map"),
)
_BIASED = ("attention_bias", "mlp_bias")
_CAPPED = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, _BIASED),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3, ("attention_bias", *_CAPPED)),
    "Gemma4ForCausalLM": Family("gemma4", gemma4.build, gemma4.READS),
    "GPT2LMHeadModel": Family("gpt2", _gpt2),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, ("attention_bias", *_CAPPED)),
    "MistralForCausalLM": Family("mistral", _mistral),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, ("attention_bias",)),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3, _BIASED),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, ("attention_bias",)),
    "MixtralForCausalLM": Family("mixtral", mixtures.mixtral, ("num_local_experts",)),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", mixtures.qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", mixtures.qwen3_moe, mixtures.QWEN3),
    "OlmoeForCausalLM": Family("olmoe", mixtures.olmoe, ("attention_bias",)),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", mixtures.deepseek_v2, mixtures.LATENT),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", mixtures.deepseek_v3, mixtures.LATENT),
    "DeepseekV32ForCausalLM": Family("deepseek_v32", mixtures.deepseek_v32, mixtures.LATENT),
    "GlmMoeDsaForCausalLM": Family("glm_moe_dsa", mixtures.glm_moe_dsa, ("attention_bias",)),
    "Glm4MoeForCausalLM": Family("glm4_moe", mixtures.glm4_moe, mixtures.GLM4),
    "Dots1ForCausalLM": Family("dots1", mixtures.dots1, ("attention_bias", "num_local_experts")),
    "FlexOlmoForCausalLM": Family("flex_olmo", mixtures.flex_olmo, mixtures.QWEN3),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", mixtures.glm4_moe_lite, ("attention_bias",)),
    "BambaForCausalLM": Family("bamba", mamba2.bamba, mamba2.BAMBA),
    "FalconH1ForCausalLM": Family("falcon_h1", mamba2.falcon_h1, mamba2.FALCON),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", mamba2.granite, mamba2.GRANITE),
    "FalconMambaForCausalLM": Family("falcon_mamba", selective.falcon_mamba),
    "JambaForCausalLM": Family("jamba", selective.jamba),
    "MambaForCausalLM": Family("mamba", selective.mamba),
    "Mamba2ForCausalLM": Family("mamba2", recurrent.mamba2),
    "NemotronHForCausalLM": Family("nemotron_h", nemotron.build, nemotron.READS),
    "Lfm2ForCausalLM": Family("lfm2", lfm2.build),
    "MiniMaxForCausalLM": Family("minimax", minimax.build, minimax.READS),
    "MiniMaxM2ForCausalLM": Family("minimax_m2", mixtures.minimax_m2, mixtures.MINIMAX),
    "GptOssForCausalLM": Family("gpt_oss", mixtures.gpt_oss, mixtures.GPT_OSS),
    "OlmoHybridForCausalLM": Family("olmo_hybrid", builders.olmo_hybrid, ("attention_bias",)),
    "KimiLinearForCausalLM": Family("kimi_linear", kimi.build, kimi.READS),
    "Qwen3_5ForCausalLM": Family("qwen3_5", builders.qwen3_5, builders.QWEN),
    "Qwen3NextForCausalLM": Family("qwen3_next", builders.qwen3_next, builders.QWEN),
    "Olmo3ForCausalLM": Family("olmo3", _olmo3, ("attention_bias",)),
    "Phi3ForCausalLM": Family("phi3", _phi3, ("auto_map",)),
}
