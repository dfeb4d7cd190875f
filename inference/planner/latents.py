"""Latent attention beside what it replaces: MHA and GQA of the same heads."""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig


def with_attention(config: ModelConfig, num_kv_heads: int) -> ModelConfig:
    """The model with attention in place of latent attention: as many query heads, of the width of
    their values, and `num_kv_heads` heads of keys and values.

    Raises:
        InputError: they do not divide the query heads.
    """

    def replaced(layer: LayerSpec) -> LayerSpec:
        latent = layer.mixer
        if not isinstance(latent, Latent):
            return layer
        mixer = Attention(latent.num_heads, num_kv_heads, latent.value_width, latent.rope)
        return dataclasses.replace(layer, mixer=mixer)

    return dataclasses.replace(config, pattern=tuple(map(replaced, config.pattern)))
