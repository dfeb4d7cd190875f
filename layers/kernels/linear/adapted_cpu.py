"""Products with adapted matrices by the native library, each in one call (`cpu/src/adapters.h`)."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from layers.kernels.cpu import calls, library
from layers.kernels.linear import packed
from layers.kernels.linear.adapted import Adapted
from layers.kernels.linear.packed import Packed

_RANKS = 16  # of which the depth of B is a multiple


def pack_up(matrix_FR: np.ndarray) -> Packed:
    """Packs B, whose depth is its ranks; raises ValueError as `packed.pack`."""
    return packed.pack(matrix_FR, _RANKS)


def abstract_up(shape: tuple[int, ...], format: str) -> Packed:
    """What `pack_up` makes of a stack [N, F, R], without its values."""
    return packed.abstract(shape, format, _RANKS)


def takes(leaf: object) -> TypeGuard[Adapted]:
    """Whether these products take a leaf: the stacks of a step's adapters are packed."""
    return isinstance(leaf, Adapted) and packed.is_packed(leaf.up)


def operands(x_TD: jax.Array, leaf: Adapted) -> tuple[jax.Array, ...]:
    """What products take for the adapters of a leaf that `takes`; a token without one costs
    nothing, and has the bits of the weight.
    """
    order = leaf.order
    assert order is not None and leaf.ranks_N is not None
    ends_P = jnp.asarray(leaf.module_ends, jnp.int32)
    return (
        x_TD, leaf.down.data, leaf.up.data, leaf.ranks_N, order.slot_T, order.token_T, ends_P
    )  # fmt: skip


def added(x_TD: jax.Array, leaf: Adapted) -> jax.Array:
    """What the adapters add alone, float32 [T, F]; zeros to tokens without one."""
    out = jax.ShapeDtypeStruct((x_TD.shape[0], leaf.up.shape[1]), jnp.float32)
    nothing = jnp.zeros(0, jnp.uint8)
    return calls.call(library.LINEAR, out, x_TD, nothing, *operands(x_TD, leaf), format="")
