"""Weights of few bits where the CPU's kernels are not: a leaf of the parameters that `linear`
knows.

Eight bits are an element, [F, D] of int8, or of uint8 where they are an e4m3. Fewer lie in planes
of bits, in words of 8 bits or, for Hopper, of 16: uint8 [F, D bits / 8] or uint16 [F, D bits / 16],
one plane behind the other in a row: int4 has one of four bits, int3 one of two, the lower ones, and
one of one bit. 128 bytes of a row's plane are as many elements as they have bits for: of L words,
word k has the bits of elements k, k + L, ... from its lowest on, and so has what is left of a row,
by less than L. So whoever takes words apart has elements side by side in the order of activations.
Scales and zero points lie by groups, [G, F], as sums over a group need them; where 16 rows share
scales (`fp8_block`), once for these, [G, F / 16]. A stack [E, F, D], of a mixture's experts, has an
axis E before these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from configs.precision import FORMATS, LARGEST_FP8, ROW_FORMATS
from layers import quantized

LANES = 128  # bytes of a plane, whose words have bits of elements so many words apart
_LARGEST_INT8 = 127
_PACKED_ROWS = 1 << 10  # that are taken apart at once
Word = type[np.uint8] | type[np.uint16]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "zero", "row"),
    meta_fields=("format", "shape", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix of shape [F, D], or a stack of them, [E, F, D], in few bits.

    Attributes:
        data: int8 [F, D], uint8 [F, D] of fp8, and else planes of bits in words of uint8 or uint16,
            [F, D bits / 8] or [F, D bits / 16].
        scale: float32 [G, F], of fp8_block [G, ceil(F / 16)]; uint8 of mxfp4 and mxfp8, powers of
            two from -127 on, and of nvfp4, e4m3.
        zero: uint8 [G, F] zero points; None: the format is symmetric.
        format: one of `configs.precision.ROW_FORMATS`.
        shape: [F, D] or [E, F, D]; D is counted, whatever `data` has.
        dtype: of the product, 'float32' or 'bfloat16', unless the format rounds activations.
        row: float32 [F] that multiplies all scales of a row; None: the format has none.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    format: str
    shape: tuple[int, ...]
    dtype: str
    row: jax.Array | None = None

    def specs(self, spec: PartitionSpec) -> Self:
        """Partition specs of its arrays where chips divide it by a spec; a scale of a whole row is
        the same for all of its columns.
        """
        axes: list[Any] = [*spec] + [None] * (len(self.shape) - len(spec))
        *stack, rows, columns = axes
        by_group = PartitionSpec(*stack, columns if has_groups(self) else None, rows)
        arrays = {
            "data": spec, "scale": by_group, "zero": None if self.zero is None else by_group,
            "row": None if self.row is None else PartitionSpec(*stack, rows),
        }  # fmt: skip
        return dataclasses.replace(self, **cast("dict[str, Any]", arrays))


def planes(format: str) -> tuple[int, ...]:
    """Bits of each plane, the lowest first."""
    return {3: (2, 1), 4: (4,), 8: (8,)}[FORMATS[format].bits]


def has_groups(w: Quantized) -> bool:
    """Whether parts of a row have scales of their own, which a product's sums do not allow for."""
    return FORMATS[w.format].group is not None


def sum_of_planes(
    product: Callable[[jax.Array, int, int], jax.Array], x_BWD: jax.Array, w: Quantized
) -> jax.Array:
    """Products with all planes, float32 [B, W, F], by `product(x_BWD, bits, shift)` with one, for
    activations of w's type.
    """
    x_BWD, shift, y_BWF = x_BWD.astype(w.dtype), 0, jnp.zeros((), jnp.float32)
    for bits in planes(w.format):
        plane_BWF = product(x_BWD, bits, shift)
        y_BWF += plane_BWF if shift == 0 else plane_BWF * (1 << shift)
        shift += bits
    return y_BWF


def stack_of(w: Quantized) -> Quantized:
    """A stack of one matrix."""
    return dataclasses.replace(jax.tree.map(lambda array: array[None], w), shape=(1, *w.shape))


def middle(format: str) -> float:
    """What is stored for 0 where a format is symmetric."""
    is_signed = FORMATS[format].bits == 8 or quantized.is_e2m1(format)
    return 0.0 if is_signed else float(1 << FORMATS[format].bits - 1)


def of_blocks(
    blocks_FX: np.ndarray, format: str, width: int, dtype: str, word: Word = np.uint8
) -> Quantized:
    """Converts blocks uint8 [F, bytes of a row] of a matrix [F, width] (or a stack, [E, F, ...]),
    as `layers.quantized` packs them; `format` and `dtype` are as in `Quantized`, planes have words
    of that type. Raises ValueError for other blocks.
    """
    info, shape = FORMATS[format], (*blocks_FX.shape[:-1], width)
    if format not in ROW_FORMATS or blocks_FX.dtype != np.uint8:
        raise ValueError(f"no blocks of {format} in {blocks_FX.dtype}")
    flat, stack = blocks_FX.reshape(-1, blocks_FX.shape[-1]), shape[:-1]
    num_groups = -(-width // info.block_in(width))
    element = _dtype(format, word)
    data = np.empty((len(flat), _row_elements(format, width, element)), element)
    scale = np.empty((len(flat), num_groups), _scale_dtype(format))
    zero = np.empty((len(flat), num_groups), np.uint8) if info.asymmetric else None
    row = np.empty(len(flat), np.float32) if info.row_bits else None
    for start in range(0, len(flat), _PACKED_ROWS):
        some = slice(start, start + _PACKED_ROWS)
        groups = quantized.unpack(format, flat[some], width)
        is_whole = info.bits == 8
        data[some] = groups.q_FD.view(data.dtype) if is_whole else _in_planes(
            groups.q_FD, planes(format), word
        )  # fmt: skip
        scale[some] = quantized.stored_scales(format, groups.scale_FG)
        if zero is not None and groups.zero_FG is not None:
            zero[some] = groups.zero_FG
        if row is not None and groups.row_F is not None:
            row[some] = groups.row_F
    scale = scale.reshape(*stack, num_groups)
    return Quantized(
        jax.device_put(data.reshape(*stack, -1)), _by_group(_shared(scale, info.rows)),
        None if zero is None else _by_group(zero.reshape(*stack, num_groups)), format, shape, dtype,
        None if row is None else jax.device_put(row.reshape(stack)),
    )  # fmt: skip


def _shared(scale_FG: np.ndarray, rows: int) -> np.ndarray:
    """Scales of the first of so many rows each; raises ValueError where the others have others."""
    first = scale_FG[..., ::rows, :]
    if rows > 1 and not np.array_equal(_of_each(first, rows, scale_FG.shape[-2]), scale_FG):
        raise ValueError(f"{rows} rows of a matrix that share scales have different ones")
    return first


def _of_each(scale_FG: np.ndarray, rows: int, count: int) -> np.ndarray:
    return np.repeat(scale_FG, rows, axis=-2)[..., :count, :]


def _in_planes(q_FD: np.ndarray, planes: tuple[int, ...], word: Word) -> np.ndarray:
    """Integers as `Quantized.data` has them: words [F, of a row]."""
    F, shift, columns = len(q_FD), 0, []
    bits_of_word, lanes = 8 * np.dtype(word).itemsize, LANES // np.dtype(word).itemsize
    for bits in planes:
        plane_FD, parts = q_FD >> shift & ((1 << bits) - 1), bits_of_word // bits
        whole = q_FD.shape[1] // (lanes * parts) * lanes * parts
        for part_FD, count in (
            (plane_FD[:, :whole], whole // (lanes * parts)),
            (plane_FD[:, whole:], 1),
        ):
            part_FCPL = part_FD.reshape(F, count, parts, part_FD.shape[1] // max(1, count * parts))
            part_FCPL = part_FCPL.astype(word)
            word_FCL = sum(part_FCPL[:, :, part] << part * bits for part in range(parts))
            columns.append(np.asarray(word_FCL, word).reshape(F, part_FD.shape[1] // parts))
        shift += bits
    return np.concatenate(columns, axis=1)


def _by_group(values_FG: np.ndarray) -> jax.Array:
    return jax.device_put(np.ascontiguousarray(values_FG.swapaxes(-1, -2)))


def random(
    key: jax.Array, shape: tuple[int, ...], format: str, dtype: str, word: Word = np.uint8
) -> Quantized:
    """Draws a matrix [F, D] (or a stack, [E, F, D]) of elements of about D ** -0.5 in place."""
    declared, middle = abstract(shape, format, dtype, word), 1 << FORMATS[format].bits - 1
    is_whole = FORMATS[format].bits == 8
    data = jax.random.bits(key, declared.data.shape, jnp.uint8 if is_whole else word)
    if _is_fp8(format):
        data &= 0xBF  # below 2, and no NaN
    size = shape[-1] ** -0.5 / (1 if _is_fp8(format) else middle)
    of_row = None if declared.row is None else jnp.full_like(declared.row, size)
    stored = np.float32(size if of_row is None else 1).reshape(1, 1)
    scale = jnp.full_like(declared.scale, quantized.stored_scales(format, stored)[0, 0])
    return dataclasses.replace(
        declared, data=lax.bitcast_convert_type(data, declared.data.dtype), scale=scale,
        zero=None if declared.zero is None else jnp.full_like(declared.zero, middle), row=of_row,
    )  # fmt: skip


def abstract(shape: tuple[int, ...], format: str, dtype: str, word: Word = np.uint8) -> Quantized:
    """What `of_blocks` makes, without its values."""
    info, (*rows, D), element = FORMATS[format], shape, _dtype(format, word)
    groups = *rows[:-1], -(-D // info.block_in(D)), -(-rows[-1] // info.rows)
    tensor = cast("Callable[..., jax.Array]", jax.ShapeDtypeStruct)
    return Quantized(
        tensor((*rows, _row_elements(format, D, element)), element),
        tensor(groups, _scale_dtype(format)),
        tensor(groups, jnp.uint8) if info.asymmetric else None, format, shape, dtype,
        tensor(tuple(rows), jnp.float32) if info.row_bits else None,
    )  # fmt: skip


def _is_fp8(format: str) -> bool:
    return "fp8" in format


def _dtype(format: str, word: Word) -> type[np.integer]:
    if FORMATS[format].bits < 8:
        return word
    return np.uint8 if _is_fp8(format) else np.int8


def _row_elements(format: str, width: int, dtype: type[np.integer]) -> int:
    """Of `Quantized.data`."""
    return width * FORMATS[format].bits // (8 * np.dtype(dtype).itemsize)


def _scale_dtype(format: str) -> type[np.generic]:
    is_byte = FORMATS[format].scale_bits == 8
    return np.uint8 if is_byte else np.float32


def rows(w: Quantized, ids_T: jax.Array) -> jax.Array:
    """Some rows of the matrix, float32 [T, D], for integers [T], clipped to its rows; ValueError
    for a stack.
    """
    if len(w.shape) != 2:
        raise ValueError(f"rows are looked up in a matrix, not in a stack of {w.shape}")
    ids_T = jnp.clip(ids_T, 0, w.shape[0] - 1)
    zero = None if w.zero is None else w.zero[:, ids_T]
    selected = dataclasses.replace(
        w, data=w.data[ids_T], scale=of_rows(w)[:, ids_T], zero=zero,
        row=None if w.row is None else w.row[ids_T],
    )  # fmt: skip
    return numbers(selected).astype(jnp.float32)


def numbers(w: Quantized) -> jax.Array:
    """Dequantizes a matrix (or rows), float32 [F, D], bit for bit as `quantized.dequantize`."""
    if FORMATS[w.format].rows > 1:  # the last group may be shorter
        size, D = FORMATS[w.format].block_in(w.shape[-1]), w.shape[-1]
        scale_FD = jnp.repeat(scales(w).T, size, axis=1)[:, :D]
        return elements(w).astype(jnp.float32) * scale_FD
    q_FGX = integers(w)
    if w.zero is not None:
        q_FGX -= w.zero.T[..., None].astype(jnp.float32)
    scaled_FGX = q_FGX * scales(w).T[..., None]
    return scaled_FGX.reshape(len(w.data), w.shape[-1])


def of_rows(w: Quantized) -> jax.Array:
    """Scales as they are stored, of each row: [.., G, F]."""
    rows, num_rows = FORMATS[w.format].rows, w.data.shape[-2]
    if rows == 1 or w.scale.shape[-1] == num_rows:
        return w.scale
    return jnp.repeat(w.scale, rows, axis=-1)[..., :num_rows]


def scales(w: Quantized) -> jax.Array:
    """Of a matrix, or of a stack: float32 [.., G, F]."""
    scale_GF = as_float(of_rows(w), w.format)
    return scale_GF if w.row is None else scale_GF * w.row[..., None, :]


def as_float(stored: jax.Array, format: str) -> jax.Array:
    """A format's scales, but for those of rows, as float32."""
    if quantized.has_powers(format):
        return lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32)
    if FORMATS[format].scale_bits > 8:
        return stored.astype(jnp.float32)
    # e4m3 without its sign: exponent and mantissa move into a float's, whose bias is 120 more.
    # Without an exponent the mantissa counts 2^-9: as that of a number above 2^-6, less 2^-6.
    bits, is_small = stored.astype(jnp.int32) << 20, stored.astype(jnp.int32) < 8
    bits += jnp.where(is_small, 121, 120) << 23
    return lax.bitcast_convert_type(bits, jnp.float32) - jnp.where(is_small, 2.0**-6, 0.0)


def times_rows(y_BWF: jax.Array, w: Quantized, matrix_B: jax.Array) -> jax.Array:
    """Products with a stack's integers and scales, times those of whole rows: [B, W, F]."""
    if w.row is None:
        return y_BWF
    return y_BWF * w.row[jnp.minimum(matrix_B, len(w.row) - 1)][:, None]


def integers(w: Quantized) -> jax.Array:
    """Elements before their scales, of asymmetric formats from 0 on: float32 [F, G, D / G]."""
    F, G = len(w.data), w.scale.shape[-2]
    if FORMATS[w.format].bits == 8:
        return elements(w).astype(jnp.float32).reshape(F, G, -1)
    start, shift, number_FD = 0, 0, jnp.zeros((), jnp.uint8)
    for bits in planes(w.format):
        stop = start + w.shape[-1] * bits // (8 * w.data.dtype.itemsize)
        number_FD |= _of_plane(w.data[:, start:stop], bits) << shift
        start, shift = stop, shift + bits
    number_FGX = number_FD.reshape(F, G, -1)
    if quantized.is_e2m1(w.format):
        return of_e2m1(number_FGX)
    return number_FGX.astype(jnp.float32) - (middle(w.format) if w.zero is None else 0)


def _of_plane(word_FX: jax.Array, bits: int) -> jax.Array:
    """Integers of so many bits, uint8 [F, D]."""
    (F, X), columns, size = word_FX.shape, [], word_FX.dtype.itemsize
    lanes = LANES // size
    whole = X // lanes * lanes
    for part_FX, width in ((word_FX[:, :whole], lanes), (word_FX[:, whole:], X - whole)):
        if part_FX.shape[1]:
            part_FCL = part_FX.reshape(F, -1, width)
            parts = [part_FCL >> n & ((1 << bits) - 1) for n in range(0, 8 * size, bits)]
            columns.append(jnp.stack(parts, axis=2).reshape(F, -1).astype(jnp.uint8))
    return jnp.concatenate(columns, axis=1)


def elements(w: Quantized) -> jax.Array:
    """Of eight bits each: int8 or float8_e4m3fn [F, D]."""
    is_fp8 = _is_fp8(w.format)
    return lax.bitcast_convert_type(w.data, jnp.float8_e4m3fn) if is_fp8 else w.data


def of_e2m1(code: jax.Array) -> jax.Array:
    """Float32 of 4 bits: sign, exponent (2), mantissa (1)."""
    size = (code & 7).astype(jnp.int32)
    whole = jnp.where(size < 2, size, (2 + (size & 1)) << jnp.maximum(size >> 1, 1) - 1)
    return jnp.where(code < 8, 0.5, -0.5) * whole.astype(jnp.float32)


def rounded_tokens(x_TD: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Rounds each token's numbers to `dtype`, int8 or float8_e4m3fn, by a scale of its own: q_TD of
    that type, and scale_T1, float32. q times scale is about x, and NaN where any number of a token
    is not finite: it has no integer, and a maximum may miss it.
    """
    x_TD = x_TD.astype(jnp.float32)
    is_int = dtype == jnp.int8
    scale_T1 = jnp.abs(x_TD).max(-1, keepdims=True) / (_LARGEST_INT8 if is_int else LARGEST_FP8)
    ratio_TD = x_TD / jnp.where(scale_T1 == 0, 1, scale_T1)
    q_TD = (jnp.rint(ratio_TD) if is_int else ratio_TD).astype(dtype)
    return q_TD, jnp.where(jnp.isfinite(x_TD).all(-1, keepdims=True), scale_T1, jnp.nan)
