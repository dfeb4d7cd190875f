"""Two mixers side by side, and none."""

from typing import cast

import jax
import jax.numpy as jnp

from configs.kinds.combined import NoMixer, Parallel
from configs.model import ModelConfig
from layers import registry
from layers.kv_cache import Paged, Recurrent, Stateful
from layers.params import Params
from layers.registry import Leaf, StepContext


def apply_parallel(
    params: Params,
    config: ModelConfig,
    kind: Parallel,
    x_TD: jax.Array,
    leaf: Stateful | None,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """Sums both mixers' outputs, float32 [T, D]; the leaf joins pages and states."""
    leaves: list[Leaf] = [None, None] if leaf is None else [leaf.paged, leaf.recurrent]
    out_TD = jnp.zeros(x_TD.shape, jnp.float32)
    scales = zip(kind.in_scales, kind.out_scales, strict=True)
    for n, (part, (in_scale, out_scale)) in enumerate(zip(kind.parts, scales, strict=True)):
        mix = registry.apply_mixer(part)
        with jax.named_scope(part.name):
            scaled_TD = x_TD * in_scale
            part_TD, leaf_after = mix(
                params[part.name], config, part, scaled_TD, leaves[n], context
            )
            leaves[n] = cast("Leaf", leaf_after)  # no part chooses for others (`ModelConfig`)
        out_TD += part_TD * out_scale
    return out_TD, None if leaf is None else Stateful(
        *cast("tuple[Paged, Recurrent]", tuple(leaves))
    )


def apply_none(
    params: Params,
    config: ModelConfig,
    kind: NoMixer,
    x_TD: jax.Array,
    leaf: Leaf,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """Zeros: float32 [T, D], and the leaf, which is empty."""
    return jnp.zeros(x_TD.shape, jnp.float32), leaf
