"""Weights as the CPU's kernels read them: a leaf of the parameters that `linear` knows.

A matrix [F, D] lies in strips of 16 features: [F / 16, D, 16] in float32 and, in pairs of a
feature's weights, [F / 16, D / 2, 16, 2] in bfloat16 (its bits in uint16, as in pages). F and D are
padded with zeros, to whole strips and to a multiple of 32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layers.kernels.cpu import library
from layers.kernels.cpu.library import DEPTH, STRIP
from layers.params import aligned


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("dtype", "shape")
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix of shape [F, D] in strips."""

    data: jax.Array
    dtype: str  # of the elements: 'float32' or 'bfloat16'
    shape: tuple[int, int]


def is_packed(node: Any) -> bool:
    """Whether a node of the parameters is a packed matrix."""
    return isinstance(node, Packed)


def pack(matrix_FD: jax.Array | np.ndarray) -> Packed:
    """A matrix of float32 or bfloat16, packed by the native library."""
    rows_FD = np.ascontiguousarray(matrix_FD)
    F, D = rows_FD.shape
    dtype = str(rows_FD.dtype)
    strips, depth = -(-F // STRIP), -(-D // DEPTH) * DEPTH
    if dtype == "float32":
        data = aligned((strips, depth, STRIP), np.float32)
    else:
        assert dtype == "bfloat16", dtype
        data = aligned((strips, depth // 2, STRIP, 2), np.uint16)
    library.pack(rows_FD, data)
    return Packed(jax.device_put(data), dtype, (F, D))


def product(x_TD: jax.Array, w: Packed) -> jax.Array:
    """x w^T, float32 [T, F], for x of float32 or bfloat16.

    Raises:
        ValueError: x has other columns than w.
    """
    if x_TD.ndim != 2 or x_TD.shape[1] != w.shape[1]:
        raise ValueError(f"{x_TD.shape} does not go with a packed matrix of {w.shape}")
    out = jax.ShapeDtypeStruct((x_TD.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(library.LINEAR, out, vmap_method="sequential")(x_TD, w.data)


def rows(w: Packed, ids_T: jax.Array) -> jax.Array:
    """Some rows of the matrix, float32 [T, D]."""
    strip_T, feature_T = ids_T // STRIP, ids_T % STRIP
    found = w.data[strip_T, :, feature_T]
    if w.dtype == "bfloat16":
        found = jax.lax.bitcast_convert_type(found, jnp.bfloat16).reshape(len(ids_T), -1)
    return found[:, : w.shape[1]].astype(jnp.float32)
