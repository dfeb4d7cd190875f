"""Mamba-2's layers as the `config.json` of many families has them, read and written."""

import math
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared import (
    export_fields,
)
from inference.families.shared.config_keys import Keys

# Of models whose files name none: states bound no context, and this is what llama.cpp takes.
MAX_CONTEXT = 1 << 20


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


def with_defaults(keys: Keys, defaults: dict[str, Any]) -> Keys:
    """The keys, and those that files leave out as their class has them."""
    return Keys(defaults | keys.raw, keys.label)


def expanded(keys: Keys) -> int:
    """Elements of all heads, as a multiple of the model's width."""
    return int(keys.number("mamba_expand", 2) * keys.integer("hidden_size"))


def mamba2(keys: Keys, inner: int, **own: Any) -> Mamba2:
    """The state-space layer as Bamba and those behind it write it.

    Args:
        keys: of the whole model.
        inner: elements of all heads.
        own: fields that a family adds.
    """
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    is_auto = keys.raw.get("mamba_d_head") in ("auto", None)
    head_width = max(inner // heads, 1) if is_auto else keys.integer("mamba_d_head")
    if heads * head_width != inner:
        raise InputError(
            f"mamba_n_heads x mamba_d_head is {heads * head_width}, and the layer's width {inner}: "
            "they have to be equal"
        )
    told: dict[str, Any] = {
        "biases": biases(keys, "mamba_proj_bias", "mamba_conv_bias"),
        "norm_width": inner // groups,
        "step_limits": step_limits(keys),
    }
    state, conv = keys.integer("mamba_d_state", 256), keys.integer("mamba_d_conv", 4)
    return Mamba2(heads, head_width, state, groups, conv, **told | own)


def expansion(mixer: Mamba2, width: int) -> float:
    """Elements of all heads, as a multiple of the model's width: whole ones are integers there."""
    times, rest = divmod(mixer.inner_width, width)
    return mixer.inner_width / width if rest else times


def limits_as_json(mixer: Mamba2) -> list[Any]:
    """See `step_limits`."""
    return [{"__float__": "Infinity"} if limit is None else limit for limit in mixer.step_limits]


def attends(config: ModelConfig) -> list[int]:
    """Numbers of the layers with attention."""
    return [n for n, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)]


def attention(config: ModelConfig) -> Attention:
    """Of the first such layer; a model without one has none to write."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, config.width, rope=None))


def hybrid_keys(config: ModelConfig) -> dict[str, Any]:
    """What all of these families write alike, of layers of the first of each kind."""
    own, ffn = attention(config), config.layers[0].ffn
    raw = export_fields.sizes(config, own.rope or Rope()) | export_fields.heads(own)
    if isinstance(ffn, Gated):
        raw |= {"intermediate_size": ffn.width, "mlp_bias": ffn.has_bias}
    return raw | {"attention_bias": "out" in own.biases} | mamba2_keys(config)


def mamba2_keys(config: ModelConfig) -> dict[str, Any]:
    """See `mamba2`."""
    mixers: list[Mamba2] = config.mixers(Mamba2)
    mixer = next(iter(mixers), Mamba2(1, 2 * config.width, 1))
    return {
        "mamba_expand": expansion(mixer, config.width),
        "mamba_n_heads": mixer.num_heads,
        "mamba_d_head": mixer.head_width,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_state": mixer.state_width,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": "conv" in mixer.biases,
        "mamba_proj_bias": "in" in mixer.biases,
        "time_step_limit": limits_as_json(mixer),
    }
