"""Which kernel updates the states of decode rows in place, and where there is one."""

import jax
import jax.numpy as jnp

from layers.backends import backends
from layers.backends.backend import StateKernel
from layers.ragged import Rectangle


def choose(
    num_tokens: int, num_keys: int, states: tuple[int, ...], decays_of_keys: bool = False
) -> StateKernel | None:
    """The back end's kernel for `update`, if any, of W tokens a row, K heads of queries and keys,
    and states [slots + 1, 1 + k, N, M, H]; decays are of heads, or of channels of keys.
    """
    _, num_states, num_heads, M, H = states
    if num_tokens > num_states:
        return None
    return backends.current().update(num_heads, num_keys, (M, H), decays_of_keys)


def update(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    log_decay: jax.Array | None,
    beta_YWN: jax.Array | None,
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array] | None:
    """Linear recurrence (`layers/recurrence/linear.py`), or with beta the gated delta rule
    (`delta.py`), of rows that follow none of the others: the state before each is read once, and
    that after each valid token is written in place. Returns outputs float32 [Y, W, N, H], arbitrary
    for padding, and the states; None: no kernel takes these.

    Args:
        q_YWKM, k_YWKM, v_YWNH: float32; N is a multiple of K.
        log_decay: of each head, [Y, W, N]; None is no decay. One of each channel of keys,
            [Y, W, N, M], is for a CPU's kernel alone.
        beta_YWN: None: a key's value is added to that of the state, which it else replaces.
        states: float32 [slots + 1, 1 + k, N, M, H], donated.
        rectangle: rows of consecutive tokens; valid ones come first.
    """
    if log_decay is None:
        log_decay = jnp.zeros(v_YWNH.shape[:3])
    kernel = choose(k_YWKM.shape[1], k_YWKM.shape[2], states.shape, log_decay.ndim > 3)
    if kernel is None:
        return None
    return kernel(q_YWKM, k_YWKM, v_YWNH, jnp.exp(log_decay), beta_YWN, states, rectangle)


def update_linear(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    log_decay: jax.Array | None,
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array] | None:
    """`update` without beta: the linear recurrence alone."""
    return update(q_YWKM, k_YWKM, v_YWNH, log_decay, None, states, rectangle)
