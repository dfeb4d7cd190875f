"""Layers with the delta rule as `config.json` has them, read and written."""

from collections.abc import Callable
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.shared.config_keys import Keys


def by_type(keys: Keys, linear: Mixer, full: Mixer, is_full: Callable[[int], bool]) -> list[Mixer]:
    """Every layer by `layer_types`, or by its number where the file lists none."""
    kinds = {"linear_attention": linear, "full_attention": full}
    count = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    names = keys.listed("layer_types", count)
    for kind in names or ():
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(
                f"{keys.label}layer type {shown(kind)} is not supported; valid: {', '.join(kinds)}"
            )
    if names is None:
        return [full if is_full(layer) else linear for layer in range(count)]
    return [kinds[kind] for kind in names]


def linear_keys(config: ModelConfig) -> dict[str, Any]:
    """Which layers attend, and of the others their heads."""
    own = first(config)
    return {
        "layer_types": _layer_types(config),
        "linear_num_value_heads": own.num_heads,
        "linear_num_key_heads": own.num_key_heads,
        "linear_key_head_dim": own.key_width,
        "linear_value_head_dim": own.value_width,
        "linear_conv_kernel_dim": own.conv_width,
    }


def first(config: ModelConfig) -> DeltaNet:
    """The first such layer; where all attend, there is none to write."""
    return next(iter(config.mixers(DeltaNet)), DeltaNet(1, 1, 1, 1))


def _layer_types(config: ModelConfig) -> list[str]:
    kinds = [isinstance(layer.mixer, DeltaNet) for layer in config.layers]
    return ["linear_attention" if is_linear else "full_attention" for is_linear in kinds]
