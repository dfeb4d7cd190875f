"""States of recurrences in plain JAX: a copy of those that rows begin with, and of those after each
token, which are scattered.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from layers.backends import backends
from layers.ragged import Rectangle


def update(
    recurrent: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array | None, ...],
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array]:
    """Feeds rows that follow none of the others to the token-by-token form, as `rows.Recurrence`
    has it; inputs [Y, W, ...], and states [slots + 1, 1 + k, ...] of all sequences, float32.
    Returns the outputs [Y, W, ...], and the states with this step's.
    """
    out_YW, after_YW = recurrent(*inputs, before(states, rectangle))
    return out_YW, keep_each(states, rectangle, after_YW)


def before(states: jax.Array, rectangle: Rectangle) -> jax.Array:
    """The state that each row's first token meets, [Y, ...]."""
    slot_Y, at_Y = rectangle.slot_Y, (rectangle.position_YW[:, 0] - 1) % states.shape[1]
    if (missing := backends.current().least_rows - len(slot_Y)) > 0:
        slot_Y, at_Y = jnp.pad(slot_Y, (0, missing)), jnp.pad(at_Y, (0, missing))
    return states[slot_Y, at_Y][: len(rectangle.slot_Y)]


def keep_each(states: jax.Array, rectangle: Rectangle, after_YW: jax.Array) -> jax.Array:
    """Stores the state after every valid token; padding goes to the sink."""
    slot_YW = jnp.where(rectangle.valid_YW, rectangle.slot_Y[:, None], states.shape[0] - 1)
    return states.at[slot_YW, rectangle.position_YW % states.shape[1]].set(after_YW)
