"""What a layer that moves information between tokens must offer, and what it is told of the
step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from configs.model import LayerSpec, ModelConfig
from layers.params import Params
from layers.ragged import Ragged


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a mixer is told besides its own parameters, inputs and cache leaf.

    Attributes:
        ragged: the step's rectangles.
        angles: cos and sin of the layer's RoPE, float32 [T, H/2] each.
        group: index of the layer's page group in `Rectangle.tables`.
        is_owner: False where the cache leaf belongs to an earlier layer (read it, write nothing).
        deterministic: a token's bits may depend on its own history only.
    """

    ragged: Ragged
    angles: tuple[jax.Array, jax.Array]
    group: int
    is_owner: bool
    deterministic: bool


class Mixer(NamedTuple):
    """A mixer is two functions; its cache is what the layer's `CacheSpec` declares.

    Attributes:
        infos: (config, layer) -> declaration of its parameters.
        apply: (params, config, layer, x_TD, cache leaf or None, context) -> (float32 [T, D], cache
            leaf).
    """

    infos: Callable[[ModelConfig, LayerSpec], Any]
    apply: Callable[
        [Params, ModelConfig, LayerSpec, jax.Array, jax.Array | None, StepContext],
        tuple[jax.Array, jax.Array | None],
    ]
