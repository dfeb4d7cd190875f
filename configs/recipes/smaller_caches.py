"""The same model with less to cache: layers that share one cache, and fewer key/value heads.

What its weights become is `inference/checkpoints/native/averaged.py`'s to say.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.kind import Mixer
from configs.model import ModelConfig


def shared_by(config: ModelConfig, size: int) -> ModelConfig:
    """Groups of `size` layers with one cache, the first layer's (cross-layer attention, Brandon et
    al. 2024, arXiv 2405.12981).

    Layers of a group have equal mixers, so the same window and positions, and follow one another
    among the layers that have these: Gemma's local layers share with local ones, across a global
    one too. What is left over is a smaller group.

    Raises:
        InputError: `size` is below 1, or the model's layers share already or never can.
    """
    if size < 1:
        raise InputError(f"a cache is shared by at least 1 layer, not {size}")
    mixers = [layer.mixer for layer in config.layers]
    if any(spec.owner is not None for spec in config.cache_specs):
        raise InputError(f"{config.name}: its layers share caches already")
    if not any(map(_can_share, mixers)):
        raise InputError(f"{config.name}: no layer of it has keys that another could read")
    layers_of: dict[Mixer, list[int]] = {}
    for layer, mixer in enumerate(mixers):
        if _can_share(mixer):
            layers_of.setdefault(mixer, []).append(layer)
    for alike in layers_of.values():
        for nth, layer in enumerate(alike):
            if nth % size:
                owner = alike[nth - nth % size]
                mixers[layer] = mixers[layer].changed({"owner": owner})
    layers = zip(mixers, config.layers, strict=True)
    pattern = tuple(dataclasses.replace(layer, mixer=mixer) for mixer, layer in layers)
    return config if size == 1 else dataclasses.replace(config, pattern=pattern)


def _can_share(mixer: Mixer) -> bool:
    return hasattr(mixer, "owner")


def with_kv_heads(config: ModelConfig, num_kv_heads: int) -> ModelConfig:
    """`num_kv_heads` in every layer of attention (Ainslie et al. 2023, arXiv 2305.13245).

    Raises:
        InputError: a layer has no such heads, or their number is no multiple of it.
    """
    heads = {mixer.num_kv_heads for mixer in config.mixers(Attention)}
    if not heads:
        raise InputError(f"{config.name}: no layer of it has key/value heads")
    for count in sorted(heads):
        if num_kv_heads < 1 or count % num_kv_heads:
            divisors = (n for n in range(1, count + 1) if count % n == 0)
            raise InputError(
                f"{config.name}: {count} key/value heads become {', '.join(map(str, divisors))}, "
                f"not {num_kv_heads}"
            )
    pattern = tuple(
        dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, num_kv_heads=num_kv_heads)
        )
        if isinstance(layer.mixer, Attention)
        else layer
        for layer in config.pattern
    )
    return dataclasses.replace(config, pattern=pattern)
