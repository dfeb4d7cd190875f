"""Reads and writes layers of Mamba and Mamba-2 as the `config.json` of many families has them."""

import math
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared import export_fields
from inference.families.shared.config_keys import Keys

_LARGEST = 3.4028234663852886e38  # of float32

# Where files state none: states bound no context. llama.cpp has the same default.
MAX_CONTEXT = 1 << 20


def biases(keys: Keys, of_products: str, of_convolution: str) -> tuple[str, ...]:
    """Returns the parts that add a bias, by the two keys that say so."""
    products, convolution = keys.boolean(of_products, False), keys.boolean(of_convolution, True)
    parts = {"in": products, "conv": convolution, "out": products}
    return tuple(part for part, has_bias in parts.items() if has_bias)


def step_rank(keys: Keys, key: str, width: int) -> int:
    """Returns the rank of Mamba's steps; 'auto' is a sixteenth of the model's width."""
    is_auto = keys.raw.get(key) in (None, "auto")
    return -(-width // 16) if is_auto else keys.integer(key)


def step_limits(keys: Keys) -> tuple[float, float | None]:
    """Returns the least and the largest step. JSON has no infinity: transformers writes an object,
    and others a number above all of float32.
    """
    raw = keys.raw.get("time_step_limit")
    if raw is None:
        return 0.0, None
    if not isinstance(raw, list) or len(raw) != 2:
        raise InputError(f"time_step_limit lists two numbers, not {shown(raw)}")
    least, largest = map(_number, raw)
    return least, None if largest > _LARGEST else largest


def _number(value: object) -> float:
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InputError(f"time_step_limit lists two numbers, not {shown(value)}")
    return float(value)


def expanded(keys: Keys) -> int:
    """Returns the elements of all heads by their ratio to the model's width."""
    return int(keys.number("mamba_expand", 2) * keys.integer("hidden_size"))


def mamba2(keys: Keys, inner: int, **fields: Any) -> Mamba2:
    """Returns Mamba-2 by the keys of Bamba and later families.

    Args:
        inner: elements of all heads.
        fields: further fields, which win.
    """
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    is_auto = keys.raw.get("mamba_d_head") in ("auto", None)
    head_width = max(inner // heads, 1) if is_auto else keys.integer("mamba_d_head")
    if heads * head_width != inner:
        raise InputError(
            f"mamba_n_heads x mamba_d_head is {heads * head_width}, and the layer's width {inner}: "
            "they have to be equal"
        )
    defaults: dict[str, Any] = {
        "biases": biases(keys, "mamba_proj_bias", "mamba_conv_bias"),
        "norm_width": inner // groups,
        "step_limits": step_limits(keys),
    }
    state, conv = keys.integer("mamba_d_state", 256), keys.integer("mamba_d_conv", 4)
    return Mamba2(heads, head_width, state, groups, conv, **defaults | fields)


def expansion(mixer: Mamba2, width: int) -> int:
    """Returns the ratio of the elements of all heads to the model's width.

    Raises:
        InputError: it is not whole, and transformers reads integers alone.
    """
    ratio, remainder = divmod(mixer.inner_width, width)
    if remainder:
        raise InputError(
            f"the {mixer.inner_width} elements of Mamba-2's heads have no place in a config.json: "
            f"they must be a multiple of the model's width, {width}"
        )
    return ratio


def limits_as_json(mixer: Mamba2) -> list[object]:
    """Returns the limits as a file states them (`step_limits`)."""
    return [{"__float__": "Infinity"} if limit is None else limit for limit in mixer.step_limits]


def attention(config: ModelConfig) -> Attention:
    """Returns the first attention, or a placeholder where no layer attends."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, config.width, rope=None))


def hybrid_keys(config: ModelConfig) -> dict[str, object]:
    """Returns the keys that Bamba and later families share, by the first layer of each kind."""
    mixer, ffn = attention(config), config.layers[0].ffn
    raw = export_fields.sizes(config, mixer.rope or Rope()) | export_fields.heads(mixer)
    if isinstance(ffn, Gated):
        raw |= {"intermediate_size": ffn.width, "mlp_bias": ffn.has_bias}
    return raw | {"attention_bias": "out" in mixer.biases} | mamba2_keys(config)


def expanded_keys(config: ModelConfig) -> dict[str, object]:
    """Returns `hybrid_keys` with the key that `expanded` reads; raises as `expansion`."""
    return hybrid_keys(config) | {"mamba_expand": expansion(_mamba2(config), config.width)}


def _mamba2(config: ModelConfig) -> Mamba2:
    """Returns the first layer of Mamba-2, or a placeholder where there is none."""
    return next(iter(config.mixers(Mamba2)), Mamba2(1, 2 * config.width, 1))


def mamba2_keys(config: ModelConfig) -> dict[str, object]:
    """Returns the keys that `mamba2` reads."""
    mixer = _mamba2(config)
    return {
        "mamba_n_heads": mixer.num_heads,
        "mamba_d_head": mixer.head_width,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_state": mixer.state_width,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": "conv" in mixer.biases,
        "mamba_proj_bias": "in" in mixer.biases,
        "time_step_limit": limits_as_json(mixer),
    }
