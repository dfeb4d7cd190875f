"""What a layer that moves information between tokens must offer, and what it is told of the
step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from configs.cache import CacheSpec
from configs.model import LayerSpec, ModelConfig
from layers.params import Params
from layers.ragged import Ragged

Leaf = Any  # an array of the cache; None or a pytree where there is no cache


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a mixer is told besides its own parameters, inputs and cache leaf.

    Attributes:
        ragged: the step's rectangles.
        angles: cos and sin of the layer's RoPE, float32 [T, X] each for X rotating pairs; None
            where it has none.
        spec: what the cache leaf holds: the layer's own `CacheSpec`, a sharer's is its owner's.
        group: index of the leaf's page group in `Rectangle.tables`.
        is_owner: False where the cache leaf belongs to an earlier layer (read it, write nothing).
        deterministic: a token's bits may depend on its own history only.
        attention: the implementation of attention over pages that was chosen (`api.choose`).
    """

    ragged: Ragged
    angles: tuple[jax.Array, jax.Array] | None
    spec: CacheSpec
    group: int
    is_owner: bool
    deterministic: bool
    attention: str = "reference"


class Mixer(NamedTuple):
    """A mixer is two functions; its cache is what the layer's `CacheSpec` declares.

    Attributes:
        infos: (config, layer) -> declaration of its parameters.
        apply: (params, config, layer, x_TD, leaf, context) -> (float32 [T, D], leaf). The leaf is
            the cache's; without a cache None at first, then whatever an owner leaves for its
            sharers.
    """

    infos: Callable[[ModelConfig, LayerSpec], Any]
    apply: Callable[
        [Params, ModelConfig, LayerSpec, jax.Array, Leaf, StepContext], tuple[jax.Array, Leaf]
    ]
