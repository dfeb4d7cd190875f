"""`config.json` as transformers reads it, written from a `ModelConfig`.

The spelling is that of transformers 4, which 5 reads too. What is written is read back and has to
give the same model: a field that no family writes here is an error, never a loss.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import LongRope, Rope
from configs.model import ModelConfig
from inference.checkpoints.hf import hf_directory
from inference.checkpoints.hf.architectures import (
    export_fields,
    gemma4,
    mixtures_export,
)
from inference.checkpoints.hf.architectures.delta_rule import export, kimi
from inference.checkpoints.hf.architectures.hybrids import lfm2, mamba2, minimax, nemotron
from inference.checkpoints.hf.architectures.scans import recurrent, selective

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Family(NamedTuple):
    """What transformers calls a family, how its fields are written, and the kinds of its layers."""

    architecture: str
    model_type: str
    build: Callable[[ModelConfig], dict[str, Any]]
    mixer: type | tuple[type, ...] = Attention
    ffns: tuple[type, ...] = (Gated, Plain)


def of_model(config: ModelConfig, ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` of a model.

    Args:
        config: the model.
        ids: of its tokens, by the names they have there. Those that are not given are null: left
            out, they would be those of the family's best known vocabulary.

    Raises:
        InputError: its family, or something about it, has no counterpart here.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise InputError(f"{config.name}: the family {config.family} has no config.json")
    for layer in config.pattern:
        if not isinstance(layer.mixer, family.mixer) or not isinstance(layer.ffn, family.ffns):
            kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
            raise InputError(f"{config.name}: a layer of {kinds} has no place in a config.json")
    raw = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.build(config),
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        **{name: (ids or {}).get(name) for name in _TOKEN_IDS},
    }
    found = hf_directory.parse_config(raw, Path(config.name))
    for field in dataclasses.fields(ModelConfig):
        name = "layers" if field.name == "pattern" else field.name
        if name not in ("name", "dtype") and getattr(config, name) != getattr(found, name):
            raise InputError(
                f"{config.name}: model.{field.name} has no place in a config.json of the family "
                f"{config.family}; --to=orbax keeps it"
            )
    return raw


def with_dtype(raw: dict[str, Any], dtype: str, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """A `config.json` whose weights are stored as `dtype`."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    ends = {} if raw.get("eos_token_id") is not None or not eos_ids else {"eos_token_id": eos_ids}
    return raw | {key: dtype} | ends


def _gemma(config: ModelConfig) -> dict[str, Any]:
    attention, _ = export_fields.first(config)
    others = ("mlp_bias", "hidden_act")
    fields = {
        key: value for key, value in export_fields.llama_fields(config).items() if key not in others
    }
    return fields | export_fields.layer_types(config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((attention.scale or attention.head_width**-0.5) ** -2),
        "attn_logit_softcapping": attention.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }  # fmt: skip


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    raw = _gemma(config)
    mixers = config.mixers(Attention)
    distant = [mixer.rope for mixer in mixers if mixer.window is None and mixer.rope]
    near = [mixer.rope for mixer in mixers if mixer.window is not None and mixer.rope]
    if distant:
        raw |= {
            "rope_theta": distant[0].theta,
            "rope_scaling": export_fields.rope_scaling(distant[0].scaling),
        }
    if near:
        raw |= {"rope_local_base_freq": near[0].theta}
    return raw if raw["sliding_window"] else raw | {"sliding_window": 4096}


def _mistral(config: ModelConfig) -> dict[str, Any]:
    return export_fields.llama_fields(config) | {
        "sliding_window": export_fields.first(config)[0].window
    }


def _qwen(config: ModelConfig) -> dict[str, Any]:
    kinds = export_fields.layer_types(config)
    return (
        export_fields.llama_fields(config)
        | kinds
        | {"use_sliding_window": kinds["sliding_window"] is not None}
    )


def _smollm3(config: ModelConfig) -> dict[str, Any]:
    rotates = [int(export_fields.attention(layer).rope is not None) for layer in config.layers]
    return _qwen(config) | {"no_rope_layers": rotates}


def _olmo3(config: ModelConfig) -> dict[str, Any]:
    """Both spellings: transformers 5 takes the older one's base for layers without a window."""
    raw = export_fields.llama_fields(config) | export_fields.layer_types(config)
    ropes = {mixer.window is None: mixer.rope or Rope() for mixer in config.mixers(Attention)}
    near = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    distant = ropes.get(True, Rope()).scaling
    raw["rope_scaling"] = export_fields.rope_scaling(distant)
    kinds = {"full_attention": near | (raw["rope_scaling"] or {}), "sliding_attention": near}
    raw |= {"rope_parameters": kinds}
    return raw if raw["sliding_window"] else raw | {"sliding_window": 4096}


def _phi3(config: ModelConfig) -> dict[str, Any]:
    attention, _ = export_fields.first(config)
    rope = attention.rope or Rope()
    scaling = rope.scaling
    original = scaling.original_context if isinstance(scaling, LongRope) else config.max_context
    return export_fields.llama_fields(config) | {
        "sliding_window": attention.window,
        "partial_rotary_factor": rope.share,
        "original_max_position_embeddings": original,
    }


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    attention, ffn = export_fields.first(config)
    scales = {mixer.scale for mixer in config.mixers(Attention)}
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_inner": ffn.width,
        "n_layer": config.num_layers,
        "n_head": attention.num_heads,
        "n_positions": config.learned_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "scale_attn_weights": attention.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len(scales) > 1,
    }


_MIXTURE, _DELTA, _HYBRID = (Gated, Experts), (Attention, DeltaNet), (Attention, Mamba2)
_ONE_PART = (NoneType, Plain, Experts)
FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", export_fields.llama_fields),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", _gemma),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma4": _Family("Gemma4ForCausalLM", "gemma4_text", gemma4.export, ffns=_MIXTURE),
    "gpt2": _Family("GPT2LMHeadModel", "gpt2", _gpt2),
    "mistral": _Family("MistralForCausalLM", "mistral", _mistral),
    "olmo2": _Family("Olmo2ForCausalLM", "olmo2", export_fields.llama_fields),
    "phi3": _Family("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "olmo3": _Family("Olmo3ForCausalLM", "olmo3", _olmo3),
    "mixtral": _Family("MixtralForCausalLM", "mixtral", mixtures_export.mixtral, ffns=_MIXTURE),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM", "qwen2_moe", mixtures_export.qwen2_moe, ffns=_MIXTURE
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", mixtures_export.qwen3_moe, ffns=_MIXTURE
    ),
    "olmoe": _Family("OlmoeForCausalLM", "olmoe", mixtures_export.olmoe, ffns=_MIXTURE),
    "deepseek_v2": _Family(
        "DeepseekV2ForCausalLM", "deepseek_v2", mixtures_export.deepseek_v2, Latent, _MIXTURE
    ),
    "deepseek_v3": _Family(
        "DeepseekV3ForCausalLM", "deepseek_v3", mixtures_export.deepseek_v3, Latent, _MIXTURE
    ),
    "deepseek_v32": _Family(
        "DeepseekV32ForCausalLM", "deepseek_v32", mixtures_export.deepseek_v32, Latent, _MIXTURE
    ),
    "glm_moe_dsa": _Family(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", mixtures_export.deepseek_v32, Latent, _MIXTURE
    ),
    "glm4_moe": _Family("Glm4MoeForCausalLM", "glm4_moe", mixtures_export.glm4_moe, ffns=_MIXTURE),
    "dots1": _Family("Dots1ForCausalLM", "dots1", mixtures_export.dots1, ffns=_MIXTURE),
    "flex_olmo": _Family(
        "FlexOlmoForCausalLM", "flex_olmo", mixtures_export.flex_olmo, ffns=_MIXTURE
    ),
    "glm4_moe_lite": _Family(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", mixtures_export.glm4_moe_lite, Latent, _MIXTURE
    ),
    "bamba": _Family("BambaForCausalLM", "bamba", mamba2.export_bamba, _HYBRID),
    "falcon_h1": _Family("FalconH1ForCausalLM", "falcon_h1", mamba2.export_falcon_h1, Parallel),
    "granitemoehybrid": _Family(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", mamba2.export_granite, _HYBRID, _MIXTURE
    ),
    "falcon_mamba": _Family(
        "FalconMambaForCausalLM", "falcon_mamba", selective.export_falcon_mamba, Mamba, (NoneType,)
    ),
    "jamba": _Family(
        "JambaForCausalLM", "jamba", selective.export_jamba, (Attention, Mamba), _MIXTURE
    ),
    "mamba": _Family("MambaForCausalLM", "mamba", selective.export_mamba, Mamba, (NoneType,)),
    "mamba2": _Family("Mamba2ForCausalLM", "mamba2", recurrent.export_mamba2, Mamba2, (NoneType,)),
    "nemotron_h": _Family(
        "NemotronHForCausalLM", "nemotron_h", nemotron.export, (*_HYBRID, NoMixer), _ONE_PART
    ),
    "lfm2": _Family("Lfm2ForCausalLM", "lfm2", lfm2.export, (Attention, ShortConv)),
    "minimax": _Family(
        "MiniMaxForCausalLM", "minimax", minimax.export, (Attention, LinearAttention), (Experts,)
    ),
    "minimax_m2": _Family(
        "MiniMaxM2ForCausalLM", "minimax_m2", mixtures_export.minimax_m2, ffns=_MIXTURE
    ),
    "gpt_oss": _Family("GptOssForCausalLM", "gpt_oss", mixtures_export.gpt_oss, ffns=_MIXTURE),
    "kimi_linear": _Family(
        "KimiLinearForCausalLM", "kimi_linear", kimi.export, (Latent, DeltaNet), _MIXTURE
    ),
    "olmo_hybrid": _Family(
        "OlmoHybridForCausalLM", "olmo_hybrid", export.olmo_hybrid, _DELTA, (Gated,)
    ),
    "qwen3_5": _Family("Qwen3_5ForCausalLM", "qwen3_5_text", export.qwen3_5, _DELTA, (Gated,)),
    "qwen3_next": _Family(
        "Qwen3NextForCausalLM", "qwen3_next", export.qwen3_next, _DELTA, _MIXTURE
    ),
    "smollm3": _Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
}
