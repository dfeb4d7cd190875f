"""Weights as the CPU's kernels read them: a leaf of the parameters that `linear` knows.

A matrix [F, D] lies in strips of 16 features. Dense ones are [F / 16, D, 16] in float32 and, in
pairs of a feature's weights, [F / 16, D / 2, 16, 2] in bfloat16 (its bits in uint16, as in pages),
F and D padded with zeros to whole strips and to a multiple of 32. Blocks, GGUF's and ours, keep
their integers and scales: uint8 [F / 16, bytes of a strip] (`layers/kernels/cpu/src/blocks.h`).
A stack [E, F, D], of a mixture's experts, has an axis E before these.
"""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from configs.precision import FORMATS, IN_FLOAT32
from layers.kernels.cpu import calls, library
from layers.kernels.cpu.library import DEPTH, STRIP
from layers.kernels.cpu.rows import GATES
from layers.kernels.linear import low_bit
from layers.params import aligned
from sharding.rules import Values


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("format", "shape")
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix of shape [F, D], or a stack of them, [E, F, D], in strips."""

    data: jax.Array
    format: str  # 'float32', 'bfloat16' or one of `BLOCKS`
    shape: tuple[int, ...]

    @property
    def numbers(self) -> jax.Array:
        """Its floats in the order of `data`, which has bfloat16 as bits; blocks stay bytes."""
        if self.format != "bfloat16":
            return self.data
        return jax.lax.bitcast_convert_type(self.data, jnp.bfloat16)

    def specs(self, spec: PartitionSpec) -> Self:
        """Partition specs of its arrays where chips divide it by a spec: strips for rows."""
        return dataclasses.replace(self, data=cast("jax.Array", spec))


_TOGETHER = 1 << 18  # numbers that are read and packed at a time
_LARGEST = 127  # of what the kernels round activations to
_exact = jax.make_user_context(default_value=False)  # a part of the keys of jit's caches
BLOCKS = tuple(
    name for name, format in FORMATS.items() if format.is_quantized and name != "llm_int8"
)


def exact(chosen: bool) -> AbstractContextManager[None]:
    """A context whose traced products leave activations as they are where a format does not say so,
    or round them to int8 (the default). Exact ones are three products with int8 (`_in_parts`),
    which sum to float32's.
    """
    return _exact(chosen)


def rounds(format: str) -> bool:
    """Whether products with blocks of a format round activations, and the format does not."""
    return format in BLOCKS and format not in IN_FLOAT32 and FORMATS[format].activations is None


def is_packed(node: object) -> TypeGuard[Packed]:
    """Whether a node of the parameters is a packed matrix."""
    return isinstance(node, Packed)


def pack(matrix_FD: jax.Array | np.ndarray, multiple: int = DEPTH) -> Packed:
    """Packs float32 or bfloat16 [F, D] (or a stack, [E, F, D]) by the native library, D padded to a
    multiple; raises ValueError for another dtype or rank.
    """
    rows_FD = np.ascontiguousarray(matrix_FD)
    if str(rows_FD.dtype) not in ("float32", "bfloat16") or rows_FD.ndim not in (2, 3):
        raise ValueError(f"{rows_FD.dtype} {rows_FD.shape} is no matrix of float32 or bfloat16")
    packed = abstract(rows_FD.shape, str(rows_FD.dtype), multiple)
    data = aligned(packed.data.shape, packed.data.dtype)
    pairs = zip(rows_FD, data, strict=True) if rows_FD.ndim == 3 else [(rows_FD, data)]
    for matrix, strips in pairs:
        library.pack(matrix, strips, multiple)
    return dataclasses.replace(packed, data=jax.device_put(data))


@jax.jit
def unpack(w: Packed) -> jax.Array:
    """What `pack` packed, [F, D] or [E, F, D]; raises ValueError for blocks."""
    *stack, F, D = w.shape
    if w.format == "float32":
        rows = w.data.swapaxes(-1, -2)
    elif w.format == "bfloat16":
        rows = jnp.moveaxis(jax.lax.bitcast_convert_type(w.data, jnp.bfloat16), -2, -3)
    else:
        raise ValueError(f"{w.shape} in {w.format} is not unpacked")
    num_strips = w.data.shape[len(stack)]
    return rows.reshape(*w.data.shape[: len(stack)], num_strips * STRIP, -1)[..., :F, :D]


def pack_rows(rows_XX: Values, format: str, shape: tuple[int, ...]) -> Packed:
    """Packs a matrix [F, D], or a stack [E, F, D], from blocks in one of `BLOCKS`: uint8 [rows of
    all matrices, bytes of D numbers], or what gives slices of them, as they never exist as a whole.
    Raises ValueError for other blocks.
    """
    packed, (*_, F, D) = abstract(shape, format), shape
    data = aligned(packed.data.shape, packed.data.dtype)
    step = max(1, _TOGETHER // (D * STRIP)) * STRIP
    for nth, strips in enumerate(data.reshape(-1, *data.shape[-2:])):
        for start in range(0, F, step):
            some = rows_XX[nth * F + start : nth * F + min(start + step, F)]
            part = strips[start // STRIP : -(-min(start + step, F) // STRIP)]
            library.pack_blocks(format, np.ascontiguousarray(some), D, part)
    return dataclasses.replace(packed, data=jax.device_put(data))


def abstract(shape: tuple[int, ...], format: str, multiple: int = DEPTH) -> Packed:
    """What packing makes of a matrix [F, D] or a stack [E, F, D], without its values."""
    *stack, F, D = shape
    strips, depth = -(-F // STRIP), -(-D // multiple) * multiple
    if format == "float32":
        data = jax.ShapeDtypeStruct((*stack, strips, depth, STRIP), np.float32)
    elif format == "bfloat16":
        data = jax.ShapeDtypeStruct((*stack, strips, depth // 2, STRIP, 2), np.uint16)
    else:
        size = library.strip_bytes(format, D)
        data = jax.ShapeDtypeStruct((*stack, strips, size), np.uint8)
    return Packed(cast("jax.Array", data), format, shape)


def product(x_TD: jax.Array, w: Packed, adapters: Sequence[jax.Array] = ()) -> jax.Array:
    """x w^T, float32 [T, F], for x of float32 or bfloat16, and what adapters add (of
    `adapted_cpu.operands`), unless w `is_in_parts`. Beside blocks x is rounded to int8, 32
    numbers by a scale, or is not (`exact`); beside `w8a8` and `w8a8_fp8` to int8 and e4m3, a token
    by a scale; beside `fp8` it stays. Under `shard_map` F is that of the strips that are here, some
    of the matrix's: columns of padding are among them unless F is a multiple of 16 times the
    devices. Rows of x that are zeros cost nothing, and give zeros whatever is in w. Raises
    ValueError if x has other columns than w, or w is a stack.
    """
    if x_TD.ndim != 2 or len(w.shape) != 2 or x_TD.shape[1] != w.shape[1]:
        raise ValueError(f"{x_TD.shape} does not go with a packed matrix of {w.shape}")
    if FORMATS[w.format].activations == "fp8":
        x_TD = rounded_to_fp8(x_TD)
    if is_in_parts(w):
        assert not adapters
        with exact(False):
            return _sum_of_parts(product(_in_parts(x_TD), w))
    F = min(w.shape[0], w.data.shape[0] * STRIP)
    out = jax.ShapeDtypeStruct((x_TD.shape[0], F), jnp.float32)
    return calls.call(library.LINEAR, out, x_TD, w.data, *adapters, format=w.format)


def is_in_parts(w: Packed) -> bool:
    """Whether products are sums of three, whose activations are `exact`."""
    return _exact.value and rounds(w.format)


def multiplies_gated(w: object) -> TypeGuard[Packed]:
    """Whether `gated_product` takes a leaf: a matrix whose halves are whole strips."""
    if not is_packed(w) or len(w.shape) != 2 or w.shape[0] % (2 * STRIP) or w.data.shape[0] % 2:
        return False
    return not is_in_parts(w) and FORMATS[w.format].activations != "fp8"


def gated_product(
    x_TD: jax.Array, w: Packed, activation: str, dtype: str, adapters: Sequence[jax.Array] = ()
) -> jax.Array:
    """act(gate) up of a matrix that `multiplies_gated`, [T, F / 2]: with the bits that `rows.gate`
    makes of `product`, except the sign of zeros. The product, gates first, is written nowhere.
    Types are 'float32' or 'bfloat16', activations those of `rows.GATES`.
    """
    F = min(w.shape[0], w.data.shape[0] * STRIP)
    out = jax.ShapeDtypeStruct((x_TD.shape[0], F // 2), jnp.dtype(dtype))
    code = np.int32(GATES[activation])
    arrays = x_TD, w.data, *adapters
    return calls.call(library.GATED, out, *arrays, format=w.format, activation=code)


def grouped_product(x_XD: jax.Array, w: Packed, sizes_E: jax.Array) -> jax.Array:
    """x w[e]^T of rows that are sorted by their matrix e of a stack, float32 [X, F], as
    `jax.lax.ragged_dot` has it, for x of float32 or bfloat16; only matrices with rows are read, and
    a row's bits are those that `product` gives it. `sizes_E` (i32) counts the rows of each matrix;
    rows behind them are 0, and a size that is negative, or more than the rows that are left, is
    cut. Under `shard_map` E and F are those that are here. Raises ValueError for x of other columns
    than w, sizes_E not of w's matrices, or w that is no stack.
    """
    if len(w.shape) != 3 or x_XD.ndim != 2 or x_XD.shape[1] != w.shape[2]:
        raise ValueError(f"{x_XD.shape} does not go with a packed stack of {w.shape}")
    if FORMATS[w.format].activations == "fp8":
        x_XD = rounded_to_fp8(x_XD)
    E, strips = w.data.shape[:2]
    if sizes_E.shape != (E,) or sizes_E.dtype != jnp.int32:
        raise ValueError(f"{E} matrices have {E} sizes of int32, not {sizes_E.shape}")
    if is_in_parts(w):
        sizes_E = 3 * jnp.clip(sizes_E, 0, len(x_XD))
        with exact(False):
            return _sum_of_parts(grouped_product(_in_parts(x_XD), w, sizes_E))
    out = jax.ShapeDtypeStruct((x_XD.shape[0], min(w.shape[1], strips * STRIP)), jnp.float32)
    return calls.call(library.GROUPED, out, x_XD, w.data, sizes_E, format=w.format)


def _in_parts(x_TD: jax.Array) -> jax.Array:
    """Each row as three, [3 T, D]: what int8 holds of it, what it holds of the rest, and the rest
    of that, of which the kernels' rounding takes less than float32's would.
    """
    T, D = x_TD.shape
    remainder_TGN = jnp.pad(x_TD.astype(jnp.float32), ((0, 0), (0, -D % DEPTH))).reshape(
        T, -1, DEPTH
    )
    parts = []
    for _ in range(2):
        scale_TG1 = jnp.abs(remainder_TGN).max(-1, keepdims=True) / _LARGEST
        rounded_TGN = jnp.round(remainder_TGN / jnp.where(scale_TG1 > 0, scale_TG1, 1)) * scale_TG1
        rounded_TGN = jax.lax.optimization_barrier(rounded_TGN)  # no multiply-add of what follows
        remainder_TGN = remainder_TGN - rounded_TGN
        parts.append(rounded_TGN)
    return jnp.stack([*parts, remainder_TGN], axis=1).reshape(3 * T, -1)[:, :D]


def _sum_of_parts(y_XF: jax.Array) -> jax.Array:
    first_TF, second_TF, third_TF = jnp.moveaxis(y_XF.reshape(-1, 3, y_XF.shape[1]), 1, 0)
    return first_TF + (second_TF + third_TF)


def rounded_to_fp8(x_TD: jax.Array) -> jax.Array:
    """Rounds each token's numbers to e4m3 times its scale: float32, as no CPU multiplies e4m3."""
    q_TD, scale_T1 = low_bit.rounded_tokens(x_TD, jnp.float8_e4m3fn)
    return q_TD.astype(jnp.float32) * scale_T1


def rows(w: Packed, ids_T: jax.Array) -> jax.Array:
    """Some rows of the matrix, float32 [T, D], for integers [T], clipped to its rows. Raises
    ValueError for a stack, or if some of its strips are elsewhere (`shard_map`), so that ids do not
    count them.
    """
    if len(w.shape) != 2:
        raise ValueError(f"rows are looked up in a matrix, not in a stack of {w.shape}")
    if w.data.shape[0] * STRIP < w.shape[0]:
        raise ValueError(f"rows of {w.shape} are looked up in all of its strips, not in a shard")
    ids_T = jnp.clip(ids_T, 0, w.shape[0] - 1)
    if w.format in BLOCKS:
        out = jax.ShapeDtypeStruct((ids_T.shape[0], w.shape[1]), jnp.float32)
        return calls.call(library.LOOKUP, out, ids_T.astype(jnp.int32), w.data, format=w.format)
    strip_T, feature_T = ids_T // STRIP, ids_T % STRIP
    rows_TX = w.data[strip_T, :, feature_T]
    if w.format == "bfloat16":
        rows_TX = jax.lax.bitcast_convert_type(rows_TX, jnp.bfloat16).reshape(len(ids_T), -1)
    return rows_TX[:, : w.shape[1]].astype(jnp.float32)
