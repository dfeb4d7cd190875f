"""States that kernels update, and what becomes of them in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from layers.ragged import Rectangle
from tests.layers.recurrence.forms import close

SLOTS = 9


def rows(num_drafts: int, counts: list[int], seed: int) -> Rectangle:
    """Rows of so many valid tokens, 0 for padding, at random slots and positions."""
    draw, counts = np.random.default_rng(seed), np.array(counts)
    slot_Y = np.where(counts > 0, draw.permutation(SLOTS)[: len(counts)], SLOTS)
    nth_W = np.arange(1 + num_drafts)
    start_Y = np.where(counts > 0, draw.integers(0, 50, len(counts)), 0)
    start_Y[0] = 0  # the state before lies at the last index
    position_YW = start_Y[:, None] + np.minimum(nth_W, np.maximum(counts[:, None] - 1, 0))
    valid_YW = nth_W < counts[:, None]
    int32 = (jnp.asarray(x, jnp.int32) for x in (slot_Y, position_YW))
    return Rectangle(*int32, jnp.asarray(valid_YW), ())


def inputs(
    rectangle: Rectangle,
    sizes: tuple[int, int, int, int],
    has_beta: bool,
    seed: int,
    decays_of_keys: bool = False,
):
    """What the kernel takes, with another number in every state; tokens of padding add nothing."""
    (Y, W), (N, K, M, H) = rectangle.position_YW.shape, sizes
    generator = np.random.default_rng(seed)
    draw = functools.partial(generator.standard_normal, dtype=np.float32)
    valid_YW1 = np.asarray(rectangle.valid_YW)[..., None]
    q, v = draw((Y, W, K, M)), draw((Y, W, N, H))
    k = draw((Y, W, K, M)) / np.sqrt(np.float32(M)) * valid_YW1[..., None]
    shape, is_token = (
        ((Y, W, N, M), valid_YW1[..., None]) if decays_of_keys else ((Y, W, N), valid_YW1)
    )
    decay = np.where(is_token, np.exp(-np.abs(draw(shape))), np.float32(1))
    beta = generator.random((Y, W, N), np.float32) * valid_YW1 if has_beta else None
    return q, k, v, decay, beta, draw((SLOTS + 1, W, N, M, H))


def loop(q, k, v, decay, beta, states, rectangle):
    """Token by token, head by head, in float64: outputs, 0 of padding; states without the sink."""
    shared, kept = v.shape[2] // k.shape[2], states.shape[1]
    out, states = np.zeros(v.shape), states.astype(np.float64)
    slot_Y, position_YW, valid_YW = map(
        np.asarray, (rectangle.slot_Y, rectangle.position_YW, rectangle.valid_YW)
    )
    for y, w, n in np.ndindex(v.shape[:3]):
        if valid_YW[y, w]:
            p = position_YW[y, w]
            key, query = (x[y, w, n // shared].astype(np.float64) for x in (k, q))
            state = decay[y, w, n].reshape(-1, 1) * states[slot_Y[y], (p - 1) % kept, n]
            value = v[y, w, n].astype(np.float64)
            if beta is not None:
                value = beta[y, w, n] * (value - state.T @ key)
            state = state + np.outer(key, value)
            states[slot_Y[y], p % kept, n], out[y, w, n] = state, state.T @ query
    return out, states[:-1]


def check(update, sizes, counts, num_drafts, has_beta, seed=0, decays_of_keys=False):
    """An update (`api.update`) gives what the loop gives, and changes no other state."""
    rectangle = rows(num_drafts, counts, seed)
    drawn = inputs(rectangle, sizes, has_beta, seed, decays_of_keys)
    expected, states = loop(*drawn, rectangle)
    out, after = jax.tree.map(np.asarray, update(*drawn, rectangle))
    close(np.where(rectangle.valid_YW[..., None, None], out, 0), expected, 3e-6)
    close(after[:-1], states, 3e-6)
    assert np.isfinite(out).all() and np.isfinite(after).all()
