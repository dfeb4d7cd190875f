"""Architectures with states in place of a growing cache, or beside one."""

import math
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures.config_keys import Keys

# Of models whose files name none: states bound no context, and this is what llama.cpp takes.
MAX_CONTEXT = 1 << 20


def mamba2(keys: Keys, name: str) -> ModelConfig:
    """Mamba-2: mixers alone."""
    keys.require_neutral({"hidden_act": ("silu", None), "rms_norm": (True, None)})
    width, heads = keys.integer("hidden_size", 4096), keys.integer("num_heads", 128)
    head_width, groups = keys.integer("head_dim", 64), keys.integer("n_groups", 8)
    mixer = Mamba2(
        heads,
        head_width,
        keys.integer("state_size", 128),
        groups,
        keys.integer("conv_kernel", 4),
        biases(keys, "use_bias", "use_conv_bias"),
        norm_width=heads * head_width // groups,
        step_limits=step_limits(keys),
    )
    inner = keys.number("expand", 2) * width
    if inner != mixer.inner_width:
        raise InputError(
            f"expand x hidden_size is {inner:g}, and num_heads x head_dim {mixer.inner_width}: "
            "they have to be equal"
        )
    return ModelConfig(
        name=name,
        family="mamba2",
        vocab_size=keys.integer("vocab_size", 32768),
        width=width,
        num_layers=keys.integer("num_hidden_layers", 64, limit=MOST_LAYERS),
        max_context=MAX_CONTEXT,
        pattern=(LayerSpec(mixer, None),),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        tied=keys.boolean("tie_word_embeddings", False),
    )


def biases(keys: Keys, of_products: str, of_convolution: str) -> tuple[str, ...]:
    """Which of a state-space layer's parts add one, by the two keys that say so."""
    has_bias = keys.boolean(of_products, False)
    conv = ("conv",) if keys.boolean(of_convolution, True) else ()
    return (*(("in",) if has_bias else ()), *conv, *(("out",) if has_bias else ()))


def step_limits(keys: Keys) -> tuple[float, float | None]:
    """Least and largest step; strict JSON has no infinity, which transformers writes as an
    object.
    """
    raw = keys.raw.get("time_step_limit")
    if raw is None:
        return 0.0, None
    if not isinstance(raw, list) or len(raw) != 2:
        raise InputError(f"time_step_limit lists two numbers, not {shown(raw)}")
    least, most = map(_number, raw)
    return least, None if most == math.inf else most


def _number(value: Any) -> float:
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InputError(f"time_step_limit lists two numbers, not {shown(value)}")
    return float(value)


def export_mamba2(config: ModelConfig) -> dict[str, Any]:
    """The fields of a Mamba-2 model's `config.json`."""
    (mixer,) = config.mixers(Mamba2)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "expand": expansion(mixer, config.width),
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_width,
        "state_size": mixer.state_width,
        "n_groups": mixer.num_groups,
        "conv_kernel": mixer.conv_width,
        "use_bias": "in" in mixer.biases,
        "use_conv_bias": "conv" in mixer.biases,
        "layer_norm_epsilon": config.norm_eps,
        "time_step_limit": limits_as_json(mixer),
    }


def expansion(mixer: Mamba2, width: int) -> float:
    """Elements of all heads, as a multiple of the model's width: whole ones are integers there."""
    times, rest = divmod(mixer.inner_width, width)
    return mixer.inner_width / width if rest else times


def limits_as_json(mixer: Mamba2) -> list[Any]:
    """See `step_limits`."""
    return [{"__float__": "Infinity"} if limit is None else limit for limit in mixer.step_limits]
