"""Attention over pages on CPUs, by the native library: keys and values are read where they lie, and
decoding and prefill sum in one order, so a token's bits do not depend on its rectangle.
"""

import jax
import jax.numpy as jnp
import numpy as np

from configs.cache import PageFormat
from layers.kernels.attention.contract import PLAIN, Demand, Options, Stretch
from layers.kernels.attention.mask import mask_bounds
from layers.kernels.cpu import calls, library
from layers.kernels.device import Device
from layers.ragged import Rectangle

_DTYPES = ("float32", "bfloat16", "fp8", "int8", "int4")


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    page_format = demand.page_format
    if device.platform != "cpu":
        return f"runs on CPUs, not on {device.kind}"
    if not library.is_loaded():
        return "needs the native library, which is not there"
    if page_format.dtype not in _DTYPES:
        return f"reads pages of {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, not {page_format.dtype}"
    widths = page_format.key_width, page_format.row_width
    # Quantized ones may meet queries of bfloat16.
    if page_format.dtype != "float32" and any(width % 2 for width in widths):
        return f"reads pairs of elements, a key has {widths[0]} and a token {widths[1]}"
    if page_format.dtype != "float32" and demand.index_width % 2:
        return f"reads pairs of elements, an indexer's key has {demand.index_width}"
    return None


def attend_pages(
    q_YWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.AttendPages`; no pages are read for tokens that are not valid."""
    bounds = mask_bounds(rectangle, options.window, options.chunked, options.first_tokens)
    stretch = Stretch(pages, rectangle.tables[group], bounds)
    return _attend(q_YWNH, stretch, rectangle.valid_YW, page_format, options, (0,))[0]


def attend_part(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AttendPart`."""
    return _attend(q_YWNH, stretch, valid_YW, page_format, options, q_YWNH.shape[:3])


def _attend(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options,
    totals: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Attention, and in an array of this shape, unless it is empty, the log-sum-exp of scores."""
    bounds, missing = stretch.bounds, jnp.zeros(0, jnp.int32)
    arrays = [bounds.first_YW, bounds.head_YW, bounds.tree_start_YW, bounds.tree_bits_YW]
    first_YW, head_YW, start_YW, bits_YW = (missing if x is None else x for x in arrays)
    sinks_N = jnp.zeros(0, jnp.float32) if options.sinks_N is None else options.sinks_N
    table_XP = stretch.table_YP.reshape(-1, stretch.table_YP.shape[-1])
    out = jax.ShapeDtypeStruct((*q_YWNH.shape[:3], page_format.value_width), options.dtype)
    out_YWNH, total_YWN = calls.call(
        library.ATTEND, (out, jax.ShapeDtypeStruct(totals, jnp.float32)), q_YWNH, stretch.pages,
        table_XP, valid_YW, bounds.last_YW, first_YW, head_YW, start_YW, bits_YW,
        sinks_N.astype(jnp.float32), format=page_format.dtype,
        score_cap=np.float32(options.score_cap or 0), kv_heads=np.int64(page_format.kv_heads),
        values_in_keys=page_format.values_in_keys,
    )  # fmt: skip
    return out_YWNH, total_YWN


def page_bounds(
    q_YWNH: jax.Array,
    extremes: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.PageBounds`, in one order of summation whatever is asked for together."""
    shape = *q_YWNH.shape[:2], page_format.kv_heads, table_YP.shape[1]
    return calls.call(
        library.BOUNDS, jax.ShapeDtypeStruct(shape, jnp.float32), q_YWNH, extremes, table_YP,
        count_Y, kv_heads=np.int64(page_format.kv_heads),
    )  # fmt: skip


def index_scores(
    q_YWIX: jax.Array,
    weights_YWI: jax.Array,
    pages: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    index_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.IndexScores`, in one order of summation whatever is asked for together."""
    shape = *q_YWIX.shape[:2], table_YP.shape[1] * pages.shape[1]
    return calls.call(
        library.SCORES, jax.ShapeDtypeStruct(shape, jnp.float32), q_YWIX, weights_YWI, pages,
        table_YP, count_Y, format=index_format.dtype,
    )  # fmt: skip
