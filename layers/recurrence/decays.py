"""Decays between tokens of a chunk, whose logarithms are sums over the tokens between."""

import jax
import jax.numpy as jnp

from layers.recurrence.sums import product

_LOWEST = -128.0  # exp of it is 0 in float32, and of all below
_UNIT = 2.0**-8


def running(log_decay: jax.Array) -> jax.Array:
    """Sums of log decays [..., T, X] up to and with each token, [2, ..., T, X]: of multiples of
    1/256, which are exact, and of the small rest. A difference of plain sums would lose digits of
    weak decays.
    """
    log_decay = jnp.maximum(log_decay, _LOWEST)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / _UNIT) * _UNIT)
    parts = jnp.stack([coarse, log_decay - coarse])
    return product("TS,...SX->...TX", jnp.tri(log_decay.shape[-2]), parts)


def between(later: jax.Array, earlier: jax.Array | float = 0.0) -> jax.Array:
    """The log decay from one token to a later one, of their `running` sums [2, ...]."""
    parts = later - earlier
    return parts[0] + parts[1]
