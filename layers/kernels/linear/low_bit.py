"""Weights of few bits where the CPU's kernels are not: a leaf of the parameters that `linear`
knows.

Eight bits are an element, [F, D] of int8, or of uint8 where they are an e4m3. Fewer lie in planes
of bits, uint8 [F, D bits / 8], one plane behind the other in a row: int4 has one of four bits, int3
one of two, the lower ones, and one of one bit. 128 bytes of a row's plane are as many elements as
they have bits for: byte k has the bits of elements k, k + 128, ... from its lowest on, and so has
what is left of a row, by less than 128. So whoever takes bytes apart has elements side by side in
the order of activations. Scales and zero points lie by groups, [G, F], as sums over a group need
them. A stack [E, F, D], of a mixture's experts, has an axis E before these.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from configs.precision import FORMATS, LARGEST_FP8
from layers import quantized

LANES = 128  # bytes of a plane, whose bits are so far apart
_LARGEST_INT8 = 127
_PACKED_ROWS = 1 << 10  # that are taken apart at once


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "zero"),
    meta_fields=("format", "shape", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix of shape [F, D], or a stack of them, [E, F, D], in few bits.

    Attributes:
        data: int8 [F, D], or uint8, [F, D] of fp8 and else [F, D bits / 8], planes of bits.
        scale: float32 [G, F]; of mxfp4 the powers of two, from -127 on, in uint8.
        zero: uint8 [G, F] zero points; None: the format is symmetric.
        format: one of `layers.quantized.OURS`.
        shape: [F, D] or [E, F, D]; D is counted, whatever `data` has.
        dtype: of the product, 'float32' or 'bfloat16', unless the format rounds activations.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    format: str
    shape: tuple[int, ...]
    dtype: str


def planes(format: str) -> tuple[int, ...]:
    """Bits of each plane, the lowest first."""
    return {3: (2, 1), 4: (4,), 8: (8,)}[FORMATS[format].bits]


def sum_of_planes(
    product: Callable[[jax.Array, int, int], jax.Array], x_BWD: jax.Array, w: Quantized, tile: int
) -> jax.Array:
    """Products with all planes, float32 [B, W, F], by `product(x_BWD, bits, shift)` with one, for
    activations of w's type in a multiple of `tile` rows.
    """
    W, shift, y_BWF = x_BWD.shape[1], 0, jnp.zeros((), jnp.float32)
    x_BWD = jnp.pad(x_BWD.astype(w.dtype), ((0, 0), (0, -W % tile), (0, 0)))
    for bits in planes(w.format):
        plane_BWF = product(x_BWD, bits, shift)
        y_BWF += plane_BWF if shift == 0 else plane_BWF * (1 << shift)
        shift += bits
    return y_BWF[:, :W]


def middle(format: str) -> float:
    """What is stored for 0 where a format is symmetric."""
    is_signed = FORMATS[format].bits == 8 or format == "mxfp4"
    return 0.0 if is_signed else float(1 << FORMATS[format].bits - 1)


def of_blocks(blocks_FX: np.ndarray, format: str, width: int, dtype: str) -> Quantized:
    """Converts blocks uint8 [F, bytes of a row] of a matrix [F, width] (or a stack, [E, F, ...]),
    as `layers.quantized` packs them; `format` and `dtype` are as in `Quantized`. Raises ValueError
    for other blocks.
    """
    info, shape = FORMATS[format], (*blocks_FX.shape[:-1], width)
    if format not in quantized.OURS or blocks_FX.dtype != np.uint8:
        raise ValueError(f"no blocks of {format} in {blocks_FX.dtype}")
    size = info.block_in(width)
    if width % size or blocks_FX.shape[-1] != round(info.bytes_for(width, width)):
        raise ValueError(f"{blocks_FX.shape[-1]} bytes are not a row of {width} in {format}")
    blocks = blocks_FX.reshape(*shape[:-1], width // size, -1)
    first = info.scale_bits // 8 - info.asymmetric
    scale = np.ascontiguousarray(blocks[..., :first])
    scale = scale[..., 0] if format == "mxfp4" else scale.view(np.float32)[..., 0]
    zero = _by_group(blocks[..., first]) if info.asymmetric else None
    if info.bits == 8:
        data = blocks[..., first:].reshape(shape).view(_dtype(format))
    else:
        flat, num_bytes = blocks_FX.reshape(-1, blocks_FX.shape[-1]), width * info.bits // 8
        data = np.empty((len(flat), num_bytes), np.uint8)
        for start in range(0, len(flat), _PACKED_ROWS):
            some = slice(start, start + _PACKED_ROWS)
            q_FD = quantized.unpack(format, flat[some], width).q_FD
            data[some] = _in_planes(q_FD, planes(format))
        data = data.reshape(*shape[:-1], num_bytes)
    return Quantized(jax.device_put(data), _by_group(scale), zero, format, shape, dtype)


def _in_planes(q_FD: np.ndarray, planes: tuple[int, ...]) -> np.ndarray:
    """Integers as `Quantized.data` has them: uint8 [F, bytes]."""
    F, shift, columns = len(q_FD), 0, []
    for bits in planes:
        plane_FD, parts = q_FD >> shift & ((1 << bits) - 1), 8 // bits
        whole = q_FD.shape[1] // (LANES * parts) * LANES * parts
        for part_FD, count in (
            (plane_FD[:, :whole], whole // (LANES * parts)),
            (plane_FD[:, whole:], 1),
        ):
            part_FCPL = part_FD.reshape(F, count, parts, part_FD.shape[1] // max(1, count * parts))
            byte_FCL = sum(part_FCPL[:, :, part] << part * bits for part in range(parts))
            columns.append(np.asarray(byte_FCL, np.uint8).reshape(F, part_FD.shape[1] // parts))
        shift += bits
    return np.concatenate(columns, axis=1)


def _by_group(values_FG: np.ndarray) -> jax.Array:
    return jax.device_put(np.ascontiguousarray(values_FG.swapaxes(-1, -2)))


def random(key: jax.Array, shape: tuple[int, ...], format: str, dtype: str) -> Quantized:
    """Draws a matrix [F, D] (or a stack, [E, F, D]) of elements of about D ** -0.5 in place."""
    declared, middle = abstract(shape, format, dtype), 1 << FORMATS[format].bits - 1
    data = jax.random.bits(key, declared.data.shape, jnp.uint8)
    if _is_fp8(format):
        data &= 0xBF  # below 2, and no NaN
    size = shape[-1] ** -0.5 / (1 if _is_fp8(format) else middle)
    power = 127 + round(math.log2(size))
    scale = jnp.full_like(declared.scale, power if format == "mxfp4" else size)
    return dataclasses.replace(
        declared, data=lax.bitcast_convert_type(data, declared.data.dtype), scale=scale,
        zero=None if declared.zero is None else jnp.full_like(declared.zero, middle),
    )  # fmt: skip


def abstract(shape: tuple[int, ...], format: str, dtype: str) -> Quantized:
    """What `of_blocks` makes, without its values."""
    info, (*rows, D) = FORMATS[format], shape
    groups = *rows[:-1], D // info.block_in(D), rows[-1]
    tensor = cast("Callable[..., jax.Array]", jax.ShapeDtypeStruct)
    return Quantized(
        tensor((*rows, D * info.bits // 8), _dtype(format)),
        tensor(groups, jnp.uint8 if format == "mxfp4" else jnp.float32),
        tensor(groups, jnp.uint8) if info.asymmetric else None, format, shape, dtype,
    )  # fmt: skip


def _is_fp8(format: str) -> bool:
    return "fp8" in format


def _dtype(format: str) -> type[np.integer]:
    return np.int8 if FORMATS[format].bits == 8 and not _is_fp8(format) else np.uint8


def rows(w: Quantized, ids_T: jax.Array) -> jax.Array:
    """Some rows of the matrix, float32 [T, D], for integers [T], clipped to its rows; ValueError
    for a stack.
    """
    if len(w.shape) != 2:
        raise ValueError(f"rows are looked up in a matrix, not in a stack of {w.shape}")
    ids_T = jnp.clip(ids_T, 0, w.shape[0] - 1)
    zero = None if w.zero is None else w.zero[:, ids_T]
    selected = dataclasses.replace(w, data=w.data[ids_T], scale=w.scale[:, ids_T], zero=zero)
    return numbers(selected).astype(jnp.float32)


def numbers(w: Quantized) -> jax.Array:
    """Dequantizes a matrix (or rows), float32 [F, D], bit for bit as `quantized.dequantize`."""
    q_FGX = integers(w)
    if w.zero is not None:
        q_FGX -= w.zero.T[..., None].astype(jnp.float32)
    scaled_FGX = q_FGX * scales(w).T[..., None]
    return scaled_FGX.reshape(len(w.data), w.shape[-1])


def scales(w: Quantized) -> jax.Array:
    """Of a matrix, or of a stack: float32 [.., G, F]."""
    return as_float(w.scale, w.format == "mxfp4")


def as_float(stored: jax.Array, is_power: bool) -> jax.Array:
    """Scales or zero points, float32; `is_power`: of two, from -127 on."""
    if not is_power:
        return stored.astype(jnp.float32)
    return lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32)


def integers(w: Quantized) -> jax.Array:
    """Elements before their scales, of asymmetric formats from 0 on: float32 [F, G, D / G]."""
    F, G = len(w.data), w.scale.shape[-2]
    if FORMATS[w.format].bits == 8:
        return elements(w).astype(jnp.float32).reshape(F, G, -1)
    start, shift, number_FD = 0, 0, jnp.zeros((), jnp.uint8)
    for bits in planes(w.format):
        stop = start + w.shape[-1] * bits // 8
        number_FD |= _of_plane(w.data[:, start:stop], bits) << shift
        start, shift = stop, shift + bits
    number_FGX = number_FD.reshape(F, G, -1)
    if w.format == "mxfp4":
        return of_e2m1(number_FGX)
    return number_FGX.astype(jnp.float32) - (middle(w.format) if w.zero is None else 0)


def _of_plane(byte_FX: jax.Array, bits: int) -> jax.Array:
    """Integers of so many bits, uint8 [F, D]."""
    F, X = byte_FX.shape
    whole, columns = X // LANES * LANES, []
    for part_FX, lanes in ((byte_FX[:, :whole], LANES), (byte_FX[:, whole:], X - whole)):
        if part_FX.shape[1]:
            part_FCL = part_FX.reshape(F, -1, lanes)
            parts = [part_FCL >> n & ((1 << bits) - 1) for n in range(0, 8, bits)]
            columns.append(jnp.stack(parts, axis=2).reshape(F, -1))
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
