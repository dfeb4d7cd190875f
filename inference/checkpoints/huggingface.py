"""`config.json` of a Hugging Face directory as a `ModelConfig`; transformers 4 and 5 spellings."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import InputError
from configs.model import LayerSpec, ModelConfig, Rope
from inference.checkpoints import mapped
from inference.checkpoints.tensor_source import TensorSource

_MAX_WIDTH = 1 << 24
_MAX_LAYERS = 10_000

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
_ROPE_NEUTRAL: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1, None)}


def read_config(directory: Path) -> ModelConfig:
    """The model that `config.json` describes.

    Raises:
        InputError: the file is unsound, the architecture is another, or a key changes the model in
            a way that is not supported.
    """
    return parse_config(mapped.read_json(directory / "config.json"), directory)


def parse_config(raw: dict[str, Any], directory: Path) -> ModelConfig:
    """As `read_config`, for the parsed object.

    Raises:
        InputError: as `read_config`.
    """
    try:
        return _build(_Keys(raw), directory.resolve().name)
    except ValueError as error:
        raise InputError(f"{directory / 'config.json'}: {error}") from None


def _build(keys: "_Keys", name: str) -> ModelConfig:
    architectures = keys.raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    builder = _ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if builder is None:
        valid = ", ".join(_ARCHITECTURES)
        raise InputError(f"architecture {architecture!r} is not supported; valid: {valid}")
    keys.require_neutral(_NEUTRAL)
    return builder(keys, name)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """A JSON object, read by type."""

    raw: dict[str, Any]
    label: str = ""

    def require_neutral(self, neutral: dict[str, tuple[Any, ...]]) -> None:
        for key, values in neutral.items():
            if self.raw.get(key) not in values:
                raise InputError(f"{self.label}{key}={str(self.raw[key])[:80]} is not supported")

    def integer(self, key: str, default: int | None = None, limit: int = _MAX_WIDTH) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise InputError(
                f"{self.label}{key} must be an integer from 1 to {limit}, not {value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.label}{key} must be a number, not {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{self.label}{key} must be positive and finite, not {value}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InputError(f"{self.label}{key} must be true or false, not {value!r}")
        return value

    def choice(self, key: str, valid: dict[str, str], default: str) -> str:
        value = self.raw.get(key) or default
        if not isinstance(value, str) or value not in valid:
            raise InputError(
                f"{self.label}{key}={value!r} is not supported; valid: {', '.join(valid)}"
            )
        return valid[value]

    def nested(self, key: str) -> "_Keys | None":
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InputError(f"{self.label}{key} must be an object, not {value!r}")
        return _Keys(value, f"{self.label}{key}: ")


def _widths(keys: _Keys, name: str, family: str, head_width: int | None) -> dict[str, Any]:
    width, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    return {
        "name": name,
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "width": width,
        "ffn_width": keys.integer("intermediate_size"),
        "num_layers": keys.integer("num_hidden_layers", limit=_MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_width": keys.integer("head_dim", head_width or max(width // num_heads, 1)),
        "max_context": keys.integer("max_position_embeddings"),
    }


def _llama(keys: _Keys, name: str) -> ModelConfig:
    scaling = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    return ModelConfig(
        **_widths(keys, name, "llama", None),
        pattern=(LayerSpec(rope=_rope(scaling, keys.number("rope_theta", 10_000.0))),),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=keys.choice("hidden_act", {"silu": "silu"}, "silu"),
        tied=keys.boolean("tie_word_embeddings", False),
    )


def _gemma3(keys: _Keys, name: str) -> ModelConfig:
    widths = _widths(keys, name, "gemma3", 256)
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    return ModelConfig(
        **widths,
        pattern=_gemma3_pattern(keys, widths["num_layers"]),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
        activation=keys.choice(
            "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh"
        ),
        attention_scale=None if scalar == widths["head_width"] else scalar**-0.5,
        embedding_scale=widths["width"] ** 0.5,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _gemma3_pattern(keys: _Keys, num_layers: int) -> tuple[LayerSpec, ...]:
    per_kind = keys.nested("rope_parameters")
    distant = per_kind.nested("full_attention") if per_kind else keys.nested("rope_scaling")
    near = per_kind.nested("sliding_attention") if per_kind else None
    kinds = {
        "full_attention": LayerSpec(rope=_rope(distant, keys.number("rope_theta", 1_000_000.0))),
        "sliding_attention": LayerSpec(
            rope=_rope(near, keys.number("rope_local_base_freq", 10_000.0)),
            window=keys.integer("sliding_window", 4096),
        ),
    }
    names = keys.raw.get("layer_types")
    if names is None:
        period = keys.integer("sliding_window_pattern", keys.raw.get("_sliding_window_pattern", 6))
        names = ["sliding_attention"] * (period - 1) + ["full_attention"]
        return tuple(kinds[kind] for kind in names)
    if not isinstance(names, list) or len(names) != num_layers:
        raise InputError(
            f"{keys.label}layer_types must list one kind for each of {num_layers} layers"
        )
    for kind in names:
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {kind!r} is not supported; valid: {', '.join(kinds)}"
            )
    return _shortest_pattern(tuple(kinds[kind] for kind in names))


def _shortest_pattern(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    for period in range(1, len(layers)):
        if all(layer == layers[i % period] for i, layer in enumerate(layers)):
            return layers[:period]
    return layers


def _rope(scaling: _Keys | None, theta: float) -> Rope:
    if scaling is None:
        return Rope(theta)
    scaling.require_neutral(_ROPE_NEUTRAL)
    theta = scaling.number("rope_theta", theta)
    key = "rope_type" if "rope_type" in scaling.raw else "type"
    kind = scaling.choice(
        key, {"default": "none", "linear": "linear", "llama3": "llama3"}, "default"
    )
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", scaling.number("factor"))
    return Rope(
        theta,
        "llama3",
        scaling.number("factor"),
        scaling.number("low_freq_factor"),
        scaling.number("high_freq_factor"),
        scaling.integer("original_max_position_embeddings"),
    )


_ARCHITECTURES: dict[str, Callable[[_Keys, str], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "Gemma3ForCausalLM": _gemma3,
}


def drop_derived(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source without tensors that only repeat what the configuration says.

    Old checkpoints store the rotary frequencies, and tied ones may store the head beside the
    embedding, which transformers then ignores.
    """
    shapes = {
        name: shape
        for name, shape in source.shapes.items()
        if not name.endswith("rotary_emb.inv_freq")
        and not (config.tied and name == "lm_head.weight")
    }
    return dataclasses.replace(source, shapes=shapes)
