"""Two mixers side by side, and none."""

import jax
import jax.numpy as jnp

from configs.kinds.combined import NoMixer, Parallel
from configs.model import ModelConfig
from layers import registry
from layers.kv_cache import Stateful
from layers.params import Params
from layers.registry import Leaf, StepContext


def apply_parallel(
    params: Params,
    config: ModelConfig,
    kind: Parallel,
    x_TD: jax.Array,
    leaf: Leaf,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """The sum of what both mixers make of the same tokens: float32 [T, D], and the leaf, the pages
    of one and the states of the other.
    """
    leaves = (None, None) if leaf is None else (leaf.pages, leaf.states)
    out_TD, kept = jnp.zeros(x_TD.shape, jnp.float32), []
    each = zip(kind.parts, leaves, kind.in_scales, kind.out_scales, strict=True)
    for part, own, in_scale, out_scale in each:
        mix = registry.apply_mixer(part)
        with jax.named_scope(part.name):
            own_TD, own = mix(params[part.name], config, part, x_TD * in_scale, own, context)
        out_TD += own_TD * out_scale
        kept.append(own)
    return out_TD, None if leaf is None else Stateful(*kept)


def apply_none(
    params: Params,
    config: ModelConfig,
    kind: NoMixer,
    x_TD: jax.Array,
    leaf: Leaf,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """Zeros: float32 [T, D], and the leaf, of which there is nothing."""
    return jnp.zeros(x_TD.shape, jnp.float32), leaf
