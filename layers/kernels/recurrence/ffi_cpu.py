"""Recurrent states on CPUs, by the native library: read once, updated and written in place; a row's
bits depend on nothing beside it.
"""

import jax
import jax.numpy as jnp

from layers.kernels.cpu import calls, library
from layers.ragged import Rectangle
from layers.recurrence import convolution


def update(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    decay: jax.Array,
    beta_YWN: jax.Array | None,
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array]:
    """`api.update`, of decays [Y, W, N] or (of channels of keys) [Y, W, N, M]; padding gives 0."""
    beta_YWN = jnp.zeros(0) if beta_YWN is None else beta_YWN
    inputs = q_YWKM, k_YWKM, v_YWNH, decay, beta_YWN
    return _call(library.UPDATE, v_YWNH.shape, inputs, states, rectangle)


def scan(
    x_YWX: jax.Array,
    dt_YWX: jax.Array,
    A_MX: jax.Array,
    B_YWM: jax.Array,
    C_YWM: jax.Array,
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array]:
    """Selective scan (`layers/recurrence/diagonal.py`) of float32 inputs and states
    [slots + 1, 1 + k, M, X], with rows and results as `api.update` has them; padding gives 0.
    """
    inputs = x_YWX, dt_YWX, A_MX, B_YWM, C_YWM
    return _call(library.SCAN, x_YWX.shape, inputs, states, rectangle)


def convolve(
    x_YWX: jax.Array,
    taps_Xw: jax.Array,
    bias_X: jax.Array | None,
    tails: jax.Array,
    rectangle: Rectangle,
    widths: tuple[int, ...],
    has_silu: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`rows.convolve` (`layers/recurrence/convolution.py`, bit for bit) of float32 inputs and tails
    [slots + 1, 1 + k, w - 1, X], with rows and tails as `api.update` has them; padding gives 0.
    """
    bias_X = jnp.zeros(0) if bias_X is None else bias_X.astype(jnp.float32)
    inputs = x_YWX, taps_Xw.astype(jnp.float32), bias_X
    out_YWX, tails = _call(library.CONVOLVE, x_YWX.shape, inputs, tails, rectangle)
    return convolution.parts(out_YWX, widths, has_silu), tails


def _call(
    target: str,
    shape: tuple[int, ...],
    inputs: tuple[jax.Array, ...],
    states: jax.Array,
    rectangle: Rectangle,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a shape, and the states, made where they lie."""
    valid_Y = rectangle.valid_YW.sum(1, dtype=jnp.int32)
    arrays = *inputs, rectangle.slot_Y, rectangle.position_YW[:, 0], valid_Y
    outs = tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in (shape, states.shape))
    return calls.call(target, outs, *arrays, states, in_place={len(arrays): 1})
