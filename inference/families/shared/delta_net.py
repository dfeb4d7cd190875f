"""Reads and writes layers with the delta rule as `config.json` has them."""

from collections.abc import Callable

from configs.kinds.kind import Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import ModelConfig
from inference.families.shared import fields
from inference.families.shared.config_keys import Keys


def by_type(keys: Keys, linear: Mixer, full: Mixer, is_full: Callable[[int], bool]) -> list[Mixer]:
    """Returns each layer's mixer by `layer_types`, or by its number where the file lists none."""
    mixers = {"linear_attention": linear, "full_attention": full}
    kinds = fields.layer_types(keys, mixers)
    if kinds is None:
        return [full if is_full(layer) else linear for layer in range(fields.num_layers(keys))]
    return [mixers[kind] for kind in kinds]


def linear_keys(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of the layers' kinds, and of the heads of those with the delta rule."""
    mixer = first(config)
    is_linear = [isinstance(layer.mixer, DeltaNet) for layer in config.layers]
    return {
        "layer_types": ["linear_attention" if x else "full_attention" for x in is_linear],
        "linear_num_value_heads": mixer.num_heads,
        "linear_num_key_heads": mixer.num_key_heads,
        "linear_key_head_dim": mixer.key_width,
        "linear_value_head_dim": mixer.value_width,
        "linear_conv_kernel_dim": mixer.conv_width,
    }


def first(config: ModelConfig) -> DeltaNet:
    """Returns the first such mixer, or a placeholder where all layers attend."""
    return next(iter(config.mixers(DeltaNet)), DeltaNet(1, 1, 1, 1))
