"""Rows of a page: how a token's elements are stored, written and read back.

bfloat16 elements are kept as their bits in uint16: XLA's CPU backend rewrites a whole bfloat16
array for every scatter and converts it to float32 for every gather, integers stay in place.

Quantized rows are bytes, made of a token's own numbers and never revised: elements, then a scale in
bfloat16 of each of their groups. A kernel never sees what wrote them, and nothing that copies pages
knows of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs.cache import PageFormat
from configs.precision import CACHE_FORMATS
from configs.settings.cache import LANES
from layers.backends import backends
from layers.ragged import Ragged

# What the largest element of a group may become; the first is the largest of the format.
_LARGEST = {"int8": (127,), "fp8": (448, 416, 384, 352, 320, 288, 256), "int4": (7,)}
_FP8_MANTISSA = 3  # bits


def token_major(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """Pages of one packed row a token."""
    shape = num_pages, page_tokens, page_format.stored_width
    dtype = "uint8" if page_format.is_quantized else page_format.dtype
    return jax.ShapeDtypeStruct(shape, stored_dtype(dtype))


def in_lanes(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """`token_major` for a TPU: a row of latents, or of bytes, is padded to whole lanes, since XLA
    would lay out others by columns, and copy all pages before and after they are written.
    """
    pages = token_major(num_pages, page_tokens, page_format)
    if not (page_format.values_in_keys or page_format.is_quantized):
        return pages
    return jax.ShapeDtypeStruct((*pages.shape[:2], page_format.padded_width(LANES)), pages.dtype)


def padded(x_ZX: jax.Array, width: int) -> jax.Array:
    """Rows [..., X] with zeros behind, [..., width]."""
    missing = width - x_ZX.shape[-1]
    return jnp.pad(x_ZX, (*((0, 0),) * (x_ZX.ndim - 1), (0, missing))) if missing else x_ZX


def stored_dtype(dtype: str) -> np.dtype[np.generic]:
    """Type that holds elements of a dtype in pages."""
    return jnp.dtype("uint16" if dtype == "bfloat16" else dtype)


def encode(x: jax.Array, pages: jax.Array) -> jax.Array:
    """Elements as `pages` stores them; bits are theirs already."""
    if pages.dtype == jnp.uint16 != x.dtype:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pages.dtype)


def decode(stored: jax.Array) -> jax.Array:
    """Stored elements as numbers."""
    is_half = stored.dtype == jnp.uint16
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if is_half else stored


def quantize(row_TX: jax.Array, page_format: PageFormat) -> jax.Array:
    """Quantizes packed rows, [T, ...] of any shape: uint8 [T, stored width].

    Elements are multiples of their group's scale, the largest of them the format's largest. Of fp8,
    whose steps grow with the number, it is the one of the larger numbers with the least squared
    error. A group with a non-finite element has a scale of NaN.
    """
    row_TX = row_TX.reshape(row_TX.shape[0], -1).astype(jnp.float32)
    elements, scales, start = [], [], 0
    for count, size in page_format.groups:
        stop = start + count * size
        x_TGE = row_TX[:, start:stop].reshape(-1, count, size)
        start = stop
        scale_TG1 = _scale(x_TGE, page_format.dtype)
        is_finite_TG1 = jnp.isfinite(x_TGE).all(-1, keepdims=True)
        is_zero_TG1 = scale_TG1 < jnp.finfo(jnp.bfloat16).tiny
        scale_TG1 = jnp.where(is_finite_TG1, jnp.where(is_zero_TG1, 0, scale_TG1), jnp.nan)
        inverse_TG1 = 1 / scale_TG1.astype(jnp.float32)
        x_TGE = jnp.where(is_finite_TG1 & ~is_zero_TG1, x_TGE * inverse_TG1, 0)
        elements.append(_as_bytes(x_TGE, page_format.dtype).reshape(len(x_TGE), -1))
        scale_TG = scale_TG1[..., 0].astype(jnp.bfloat16)
        scales.append(jax.lax.bitcast_convert_type(scale_TG, jnp.uint8).reshape(len(x_TGE), -1))
    return jnp.concatenate([*elements, *scales], axis=1)


def _scale(x_TGE: jax.Array, format: str) -> jax.Array:
    """A scale of each group, bfloat16 [T, G, 1], rounded before elements become multiples of it.

    Nothing is divided by an array but 1, as XLA's CPU backend rounds other quotients as the shape
    has it. Errors are compared as sums of integers, which have no order; products of few bits are
    exact, fused with a sum or not.
    """
    largest_TG1 = jnp.abs(x_TGE).max(-1, keepdims=True)
    candidates = [
        (largest_TG1 * (1 / largest)).astype(jnp.bfloat16) for largest in _LARGEST[format]
    ]
    best_TG1, *alternatives = candidates
    if not alternatives:
        return best_TG1

    def error(scale_TG1: jax.Array) -> jax.Array:
        scale_TG1 = scale_TG1.astype(jnp.float32)
        rounded_TGE = jax.lax.reduce_precision(x_TGE * (1 / scale_TG1), 8, _FP8_MANTISSA)
        share_TGE = (rounded_TGE * scale_TG1 - x_TGE) * (1 / largest_TG1)
        return (jnp.round(share_TGE * 2.0**14).astype(jnp.int32) ** 2).sum(-1, keepdims=True)

    least_TG1 = error(best_TG1)
    for scale_TG1 in alternatives:
        error_TG1 = error(scale_TG1)
        best_TG1 = jnp.where(error_TG1 < least_TG1, scale_TG1, best_TG1)
        least_TG1 = jnp.minimum(error_TG1, least_TG1)
    return best_TG1


def numbers(
    stored_TX: jax.Array, page_format: PageFormat, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Rows of any format as numbers; quantized ones of a type."""
    if page_format.is_quantized:
        return dequantize(stored_TX, page_format, dtype)
    return decode(stored_TX)


def as_stored(row_TX: jax.Array, page_format: PageFormat) -> jax.Array:
    """Rows [T, ...] as `write` takes them for pages of a format."""
    return quantize(row_TX, page_format) if page_format.is_quantized else row_TX


def dequantize(
    stored_TX: jax.Array, page_format: PageFormat, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Rows of a quantized format, uint8 [..., stored width], as [..., row width] of a type."""
    bits = CACHE_FORMATS[page_format.dtype].bits
    start, scales_at, rows = 0, page_format.element_bytes, []
    for count, size in page_format.groups:
        stop, scales_stop = start + count * size * bits // 8, scales_at + 2 * count
        bytes_TGX = stored_TX[..., start:stop].reshape(*stored_TX.shape[:-1], count, -1)
        pairs_TG2 = stored_TX[..., scales_at:scales_stop].reshape(*bytes_TGX.shape[:-1], 2)
        scale_TG = jax.lax.bitcast_convert_type(pairs_TG2, jnp.bfloat16).astype(jnp.float32)
        x_TGE = _as_numbers(bytes_TGX, page_format.dtype) * scale_TG[..., None]
        # Rounded here, whatever XLA would like to compute with instead.
        precision = jnp.finfo(dtype)
        x_TGE = jax.lax.reduce_precision(x_TGE, precision.nexp, precision.nmant)
        rows.append(x_TGE.astype(dtype).reshape(*stored_TX.shape[:-1], count * size))
        start, scales_at = stop, scales_stop
    return jnp.concatenate(rows, axis=-1)


def _as_bytes(x_TGE: jax.Array, format: str) -> jax.Array:
    """Multiples of a scale, rounded to even, as bytes; four bits: a group's first half is low."""
    largest = _LARGEST[format][0]
    x_TGE = jnp.clip(x_TGE, -largest, largest)
    if format == "fp8":
        return jax.lax.bitcast_convert_type(x_TGE.astype(jnp.float8_e4m3fn), jnp.uint8)
    rounded_TGE = jnp.round(x_TGE).astype(jnp.int8)
    if format == "int8":
        return jax.lax.bitcast_convert_type(rounded_TGE, jnp.uint8)
    low, high = jnp.split((rounded_TGE + 8).astype(jnp.uint8), 2, axis=-1)
    return low | high << 4


def _as_numbers(bytes_TGX: jax.Array, format: str) -> jax.Array:
    if format == "int4":
        halves = jnp.concatenate([bytes_TGX & 15, bytes_TGX >> 4], axis=-1)
        return halves.astype(jnp.float32) - 8
    dtype = jnp.float8_e4m3fn if format == "fp8" else jnp.int8
    return jax.lax.bitcast_convert_type(bytes_TGX, dtype).astype(jnp.float32)


def write(pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """Stores each packed token's row, [T, ...] of any shape, in place where `pages` is donated.
    Pages are viewed in the row's shape unless that copies them, since XLA's CPU backend computes a
    reshape of the elements one by one.
    """
    width = pages.shape[2]
    if math.prod(row_TX.shape[1:]) < width:
        row_TX = padded(row_TX.reshape(len(row_TX), -1), width)
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    if not backends.current().has_free_views:
        row_TX = row_TX.reshape(-1, *pages.shape[2:])
    view = pages.reshape(*pages.shape[:2], *row_TX.shape[1:])
    view = view.at[page_T, offset_T].set(encode(row_TX, pages), mode="promise_in_bounds")
    return view.reshape(pages.shape)
