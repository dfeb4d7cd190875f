"""Attention over pages on TPUs (Pallas), fused with the append of the step's keys and values.

A row of the grid is a tile of one sequence's queries. Its pages come through a ring of blocks in
VMEM that is filled ahead of its use, across rows, so that a row need not wait for its first page;
pages that slid out of a window are skipped. A block is whole pages as they lie in memory: a head's
keys are columns of it and need no shuffle on their way to the matrix unit. The softmax is folded
over blocks (Milakov & Gimelshein 2018, arXiv 1805.02867): first all heads' weights of a block, then
all heads' values, since results leave a matrix unit in order and a head waits long for its own.

Of latents (DeepSeek-AI 2024, arXiv 2405.04434) a row is the one key of all heads, and its first
columns are the value, so one copy brings both. Rows of 576 elements are no whole number of lanes:
they lie in 640 (`page_rows.in_lanes`), the last of which are 0.

The step's own keys and values are merged into the block that they belong to, which is there to be
read anyway, and leave from it in groups of tokens, since no copy reaches into a tile of memory.
A row that reads what an earlier one appends, as the tiles of one prompt do, is not fetched before
that one is done.

Quantized rows (int8 and fp8) lie in whole lanes, too, their scales behind the elements, and come as
they are. Elements are multiplied without their scales: a scale is a token's, so it multiplies that
token's scores, or its weight.

Z counts rows of the grid, U the query rows of one (`tiles.py`), S the tokens of a block or those
that a row's groups of appended tokens span, X the elements of a packed row, C those of a value.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import contract
from layers.kernels.attention.contract import PLAIN, Demand, Options, Stretch
from layers.kernels.attention.mask import MaskBounds, mask_bounds, visible
from layers.kernels.attention.tiles import Tiling, visible_pages
from layers.kernels.device import Device
from layers.linear import soft_cap
from layers.ragged import Rectangle

# v5e, v5p, v6e and 7x under the names that jax knows (jax/_src/pallas/mosaic/tpu_info.py).
KINDS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
_DTYPES = ("bfloat16", "float32", "int8", "fp8")
_LANES = 64  # heads begin at multiples of it
_WHOLE_LANES = 128  # and rows of latents, and quantized ones, take a multiple of it
_GROUP, _BYTES_GROUP = 16, 32  # tokens that are written at once: whole tiles of numbers, of bytes
_ROWS = 8  # of a float32 tile
_TILE_BYTES = 12 << 20  # of queries, output and sums, unless a row must not be divided
_BLOCK_TOKENS, _BLOCK_BYTES = 512, 4 << 20  # of a block, at most, and at least a page
_FEW_ROWS = 64  # of queries, at most: their blocks have twice as many tokens
_STAGES = 3  # blocks on their way or in use
_VMEM_BYTES = 48 << 20  # of 64 MiB (7x) or 128
_TABLE_ENTRIES = 224 << 10  # that are kept in scalar memory, 896 KiB of 1 MiB
_MASKED = -1e30


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    page_format = demand.page_format
    if device.kind not in KINDS:
        return f"runs on TPU v5e, v5p, v6e and 7x, not on {device.kind}"
    if demand.deterministic:
        return "has not been measured to be deterministic"
    if demand.has_first_tokens:
        return contract.FIRST_TOKENS
    if page_format.dtype == "int4":
        return "reads caches of int8 and fp8, not of int4: set model.cache_format"
    if demand.has_choice:
        return contract.CHOICE
    if page_format.dtype not in _DTYPES:
        return (
            f"reads pages of bfloat16 or float32, not {page_format.dtype}: set model.dtype=bfloat16"
        )
    if demand.page_tokens % _group(page_format):
        sizes = "32, 64 or 128" if page_format.is_quantized else "16, 32, 64 or 128"
        page_tokens = demand.page_tokens
        return f"reads pages of {sizes} tokens, not {page_tokens}: set engine.cache.page_tokens"
    if page_format.values_in_keys:
        if page_format.value_width % _WHOLE_LANES:
            return f"has latents of a multiple of {_WHOLE_LANES}, not {page_format.value_width}"
        return table_limit(demand)
    if (reason := contract.uneven_limit(page_format)) is not None:
        return reason
    if page_format.key_width % _LANES:
        return f"has heads of a multiple of {_LANES}, not {page_format.key_width}"
    return table_limit(demand)


def table_limit(demand: Demand) -> str | None:
    """What is too much for scalar memory, which holds a rectangle's page tables as a whole."""
    if demand.table_entries <= _TABLE_ENTRIES:
        return None
    return (
        f"has room for page tables of {_TABLE_ENTRIES} entries, {demand.table_entries} are needed "
        "(sequences x pages): lower engine.max_seqs or engine.max_context, raise "
        "engine.cache.page_tokens"
    )


def attend_pages(
    q_YWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """`contract.AttendPages`, where the step's keys are written already."""
    stretch = _stretch(pages, rectangle, group, options)
    is_chain = _is_chain(rectangle)
    return _attend(
        q_YWNH, None, stretch, rectangle.valid_YW, page_format, options, interpret, is_chain
    )[0]


def append_and_attend(
    q_YWNH: jax.Array,
    row_YWX: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AppendAndAttend`; `interpret` as in `attend_pages`."""
    stretch, is_chain = _stretch(pages, rectangle, group, options), _is_chain(rectangle)
    out_YWNH, _, pages = _attend(
        q_YWNH, _New(row_YWX, rectangle.kv_position_YW), stretch, rectangle.valid_YW, page_format,
        options, interpret, is_chain,
    )  # fmt: skip
    return out_YWNH, pages


def attend_part(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AttendPart`; `interpret` as in `attend_pages`."""
    out_YWNH, total_YWN, _ = _attend(
        q_YWNH, None, stretch, valid_YW, page_format, options, interpret, has_totals=True
    )
    assert total_YWN is not None
    return out_YWNH, total_YWN


def append_and_attend_part(
    q_YWNH: jax.Array,
    row_YWX: jax.Array,
    kv_position_YW: jax.Array,
    share: tuple[jax.Array | int, int],
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`contract.AppendAndAttendPart`; `interpret` as in `attend_pages`."""
    out_YWNH, total_YWN, pages = _attend(
        q_YWNH, _New(row_YWX, kv_position_YW, share), stretch, valid_YW, page_format, options,
        interpret, has_totals=True,
    )  # fmt: skip
    assert total_YWN is not None
    return out_YWNH, total_YWN, pages


class _New(NamedTuple):
    """Rows of tokens [Y, W, ...] that pages get, their KV positions, and which of several chips is
    to store its own of them.
    """

    row_YWX: jax.Array
    kv_position_YW: jax.Array
    share: tuple[jax.Array | int, int] | None = None


def _stretch(pages: jax.Array, rectangle: Rectangle, group: int, options: Options) -> Stretch:
    bounds = mask_bounds(rectangle, options.window, options.chunked)
    return Stretch(pages, rectangle.tables[group], bounds)


def _is_chain(rectangle: Rectangle) -> bool:
    """Whether no token sees later ones."""
    return rectangle.ancestors_YW is None and rectangle.causal_Y is None


def _attend(
    q_YWNH: jax.Array,
    new: _New | None,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options,
    interpret: bool | pltpu.InterpretParams,
    is_chain: bool = True,
    has_totals: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Attention, float32, on demand log-sum-exps, and the pages with what is new."""
    pages, table_YP, bounds = stretch
    if page_format.values_in_keys:
        q_YWNH = page_rows.padded(q_YWNH, pages.shape[2])
    (Y, W, N, H), page_tokens = q_YWNH.shape, pages.shape[1]
    G, value_width = N // page_format.kv_heads, page_format.value_width
    # Queries and float32 output come and go while others are used; sums take a lane row each.
    token_bytes = N * (2 * H * q_YWNH.dtype.itemsize + value_width * (2 * 4 + 4) + 2 * 128 * 4)
    # A token that sees later ones needs them all in place.
    width = min(W, max(1, _TILE_BYTES // token_bytes)) if is_chain else W
    # Without rows of padding, queries and output are used as they lie.
    tiling = Tiling(width, G, G if width == 1 else -(-width * G // _ROWS) * _ROWS)
    valid_ZW = tiling.split(valid_YW)
    bounds = jax.tree.map(tiling.split, bounds)
    Z = valid_ZW.shape[0]
    table_ZP = jnp.repeat(table_YP, Z // Y, axis=0)
    count_Z = valid_ZW.sum(1, dtype=jnp.int32)
    start_Z, stop_Z = visible_pages(bounds, valid_ZW, page_tokens)
    new_rows: _NewRows = ()
    kv_position_Z = waits_Z = jnp.zeros_like(count_Z)
    if new is not None:
        kv_position_Z = tiling.split(new.kv_position_YW)[:, 0]
        row_ZWX = tiling.split(page_rows.padded(new.row_YWX.reshape(Y, W, -1), pages.shape[2]))
        if new.share is not None:
            row_ZWX, kv_position_Z, count_Z = _of_chip(row_ZWX, kv_position_Z, count_Z, *new.share)
        if width == 1 and not page_format.is_quantized:
            # A head's key or value is a row, as XLA has them.
            row_ZXH = row_ZWX.reshape(Z, -1, H)
            parts = jnp.split(row_ZXH, row_ZXH.shape[1] // page_format.kv_heads, axis=1)
            new_rows = tuple(part.astype(jnp.float32) for part in parts)
        else:
            row_ZWX = page_rows.encode(row_ZWX, pages)
            new_rows = _aligned(row_ZWX, kv_position_Z, _group(page_format))
        waits_Z = _waits(table_ZP, kv_position_Z // page_tokens, count_Z)
    next_Z = _next(stop_Z > start_Z)
    rows = _Rows(table_ZP, start_Z, stop_Z, next_Z, kv_position_Z, count_Z, waits_Z)
    sinks_N = jnp.full(N, _MASKED, jnp.float32) if options.sinks_N is None else options.sinks_N
    out_ZKUH, total_ZUK, pages = _attend_tiles(
        rows, tiling.pack(q_YWNH), jax.tree.map(tiling.spread, bounds), tiling.sinks(sinks_N),
        new_rows, pages, page_format, options.score_cap, has_totals, interpret,
    )  # fmt: skip
    out_YWNH = tiling.unpack(out_ZKUH, (Y, W, N, value_width)).astype(jnp.float32)
    if total_ZUK is None:
        return out_YWNH, None, pages
    total_YWN = tiling.unpack(total_ZUK.swapaxes(1, 2)[..., None], (Y, W, N, 1))[..., 0]
    return out_YWNH, total_YWN, pages


def _of_chip(
    row_ZWX: jax.Array,
    kv_position_Z: jax.Array,
    count_Z: jax.Array,
    chip: jax.Array | int,
    chips: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a row's tokens those of one of several chips, the index there of the first (0 where there
    are none, the beginning of a group), and how many they are.
    """
    width = row_ZWX.shape[1]
    first_Z = (chip - kv_position_Z) % chips
    nth_ZW = jnp.minimum(first_Z[:, None] + chips * jnp.arange(-(-width // chips)), width - 1)
    num_tokens_Z = (count_Z - first_Z + chips - 1) // chips
    index_Z = jnp.where(num_tokens_Z > 0, (kv_position_Z + first_Z) // chips, 0)
    return jnp.take_along_axis(row_ZWX, nth_ZW[:, :, None], axis=1), index_Z, num_tokens_Z


def _group(page_format: PageFormat) -> int:
    return _BYTES_GROUP if page_format.is_quantized else _GROUP


def _aligned(row_ZWX: jax.Array, kv_position_Z: jax.Array, group: int) -> jax.Array:
    """A row's tokens in their groups, the first of which holds the first token: [Z, S, X]."""
    width = row_ZWX.shape[1]
    num_groups = (width + 2 * group - 2) // group
    nth_ZS = jnp.arange(num_groups * group) - kv_position_Z[:, None] % group
    return jnp.take_along_axis(row_ZWX, jnp.clip(nth_ZS, 0, width - 1)[:, :, None], axis=1)


def _waits(table_ZP: jax.Array, column_Z: jax.Array, count_Z: jax.Array) -> jax.Array:
    """Whether a row reads what an earlier one appends, i32[Z]: rows with one page in a column are
    of one sequence, because a page that is written belongs to one.
    """
    page_ZZ = jnp.take(table_ZP, column_Z, axis=1)  # [reader, writer]
    is_same_ZZ = (page_ZZ == jnp.diagonal(page_ZZ)) & (count_Z > 0)
    return jnp.tril(is_same_ZZ, -1).any(1).astype(jnp.int32)


def _next(has_pages_Z: jax.Array) -> jax.Array:
    """The first row that has pages, and the next after each: i32[Z + 1], Z for none."""
    Z = has_pages_Z.shape[0]
    row_Z = jnp.where(has_pages_Z, jnp.arange(Z, dtype=jnp.int32), Z)
    return jnp.append(lax.cummin(row_Z, reverse=True), jnp.int32(Z))


# --- the kernel -----------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What is known of each row of the grid before it is read, i32 in scalar memory."""

    table: jax.Array  # [Z, P]
    start: jax.Array  # [Z]: the first column of the table that is read
    stop: jax.Array  # [Z]: and after the last
    next: jax.Array  # [Z + 1]: `_next`
    kv_position: jax.Array  # [Z]: of the first of its tokens
    num_tokens: jax.Array  # [Z]: its tokens
    waits: jax.Array  # [Z]: whether it reads what an earlier row appends


# Of a token a row a tuple of its parts [Z, K, H], perhaps none; of more [Z, S, X].
_NewRows = jax.Array | tuple[jax.Array, ...]
_Ref = pl.MemoryRef | pltpu.SemaphoreType


class _Memory(NamedTuple):
    """What outlives a row (the ring and its cursor), and the sums of a row's softmax."""

    ring: _Ref  # [stages, S, X] or wider
    arrived: _Ref  # semaphore a stage
    stored: _Ref  # semaphore
    cursor: _Ref  # i32[4]: row and column of the next block to fetch; blocks fetched, blocks used
    maximum: _Ref  # f32[K, U, 128], equal lanes
    mass: _Ref  # f32[K, U, 128], equal lanes
    values: _Ref  # f32[K, U, C]


def _attend_tiles(
    rows: _Rows,
    q_ZKUH: jax.Array,
    bounds: MaskBounds,  # i32[Z, U] each
    sinks_KU: jax.Array,
    new: _NewRows,
    pages: jax.Array,
    page_format: PageFormat,
    score_cap: float | None,
    has_totals: bool,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """[Z, K, U, value width] of the queries' dtype, and the pages with what is new; between them,
    on demand, log-sum-exps, [Z, U, K], of results in float32, as others are added to them.
    """
    (Z, K, num_rows, H), (_, page_tokens, X) = q_ZKUH.shape, pages.shape
    page_bytes = page_tokens * X * pages.dtype.itemsize
    most_tokens = _BLOCK_TOKENS * (2 if num_rows <= _FEW_ROWS else 1)
    block_pages = max(1, min(most_tokens // page_tokens, _BLOCK_BYTES // page_bytes))
    block_tokens, group = block_pages * page_tokens, _group(page_format)
    C, num_parts = page_format.value_width, len(new) if isinstance(new, tuple) else 0
    appends = len(jax.tree.leaves(new)) > 0
    # Tiles of a column lie in one bank of memory, unless a row is an odd number of them.
    padding = 0 if X // _WHOLE_LANES % 2 else _WHOLE_LANES
    # Columns, to be compared with rows of KV positions.
    bounds_ZUX, sinks_KU1 = jnp.stack(jax.tree.leaves(bounds), axis=2), sinks_KU[:, :, None]

    def kernel(
        rows, q_ref, bounds_ref, sinks_ref, new_refs, pages_ref, out_ref, written_ref, total_ref,
        memory,
    ):  # fmt: skip
        ring, cursor = memory.ring, memory.cursor
        pages_ref = written_ref if appends else pages_ref  # the same pages, as they come to be
        b = pl.program_id(0)

        def tokens(i):
            """Those of the nth page of a block."""
            return pl.ds(pl.multiple_of(i * page_tokens, group), page_tokens)

        def copies(row, column, stage, act):
            @pl.loop(0, jnp.minimum(block_pages, rows.stop[row] - column))
            def _(i):
                page = pages_ref.at[rows.table[row, column + i]]
                into = ring.at[stage, tokens(i), pl.ds(0, X)]
                act(pltpu.make_async_copy(page, into, memory.arrived.at[stage]))

        def clear_absent(row, column, stage):
            """Pages of the stage that are not read: their values are multiplied by 0."""

            @pl.loop(jnp.minimum(block_pages, rows.stop[row] - column), block_pages)
            def _(i):
                ring[stage, tokens(i)] = jnp.zeros((page_tokens, ring.shape[2]), ring.dtype)

        def fetch_ahead():
            """Fills the stages that nothing is on its way to."""

            @pl.loop(0, _STAGES - (cursor[2] - cursor[3]))
            def _fetch(_):
                row, column, num_fetched = cursor[0], cursor[1], cursor[2]
                valid_row = jnp.minimum(row, Z - 1)

                @pl.when((row < Z) & ((row <= b) | (rows.waits[valid_row] == 0)))
                def _start():
                    stage = lax.rem(num_fetched, _STAGES)
                    copies(row, column, stage, lambda copy: copy.start())
                    # Later blocks find numbers of earlier ones.
                    pl.when(num_fetched < _STAGES)(lambda: clear_absent(row, column, stage))
                    is_last = column + block_pages >= rows.stop[row]
                    following = rows.next[row + 1]
                    after = rows.start[jnp.minimum(following, Z - 1)]
                    cursor[0] = jnp.where(is_last, following, row)
                    cursor[1] = jnp.where(is_last, after, column + block_pages)
                    cursor[2] = num_fetched + 1

        def new_groups(kv_position):
            """Groups with tokens of the row, in the block that begins at a KV position."""
            begin, end = rows.kv_position[b], rows.kv_position[b] + rows.num_tokens[b]
            last = jnp.minimum(pl.cdiv(end, group), (kv_position + block_tokens) // group)
            return pl.loop(jnp.maximum(begin, kv_position) // group, last)

        def store(g, kv_position, stage):
            """The copy of a group to its page, from the block that begins at a KV position."""
            inside = pl.ds(pl.multiple_of(g * group - kv_position, group), group)
            page = rows.table[b, g * group // page_tokens]
            to = pl.ds(pl.multiple_of(lax.rem(g * group, page_tokens), group), group)
            source = ring.at[stage, inside, pl.ds(0, X)]
            return pltpu.make_async_copy(source, pages_ref.at[page, to], memory.stored)

        def append(kv_position, stage):
            """Merges the row's tokens into the block from a KV position on; starts its store."""
            begin = rows.kv_position[b]

            @new_groups(kv_position)
            def _(g):
                inside = pl.ds(pl.multiple_of(g * group - kv_position, group), group)

                def merge(lanes, new_SX):
                    kv_position_SX = lax.broadcasted_iota(jnp.int32, new_SX.shape, 0) + g * group
                    is_new_SX = (kv_position_SX >= begin) & (
                        kv_position_SX < begin + rows.num_tokens[b]
                    )
                    old_SX = ring[stage, inside, lanes]
                    if page_format.is_quantized:  # masks are made for wider elements
                        new_SX, old_SX = new_SX.astype(jnp.int32), old_SX.astype(jnp.int32)
                    merged_SX = jnp.where(is_new_SX, new_SX, old_SX)
                    ring[stage, inside, lanes] = merged_SX.astype(ring.dtype)

                if not isinstance(new_refs, tuple):
                    source = pl.multiple_of((g - begin // group) * group, group)
                    merge(slice(X), new_refs[0, pl.ds(source, group)])
                for part, head in itertools.product(range(num_parts), range(K)):
                    new_SH = jnp.broadcast_to(new_refs[part][0, head : head + 1], (group, H))
                    at = pl.ds((part * K + head) * H, H)
                    merge(at, page_rows.encode(new_SH, pages_ref))
                store(g, kv_position, stage).start()

        def lanes_of(head):
            """Elements of a head's key and of its value in a row."""
            begin = page_format.values.start + head * C
            return slice(head * H, (head + 1) * H), slice(begin, begin + C)

        def parts_of(head):
            """Of a quantized key and value, the last part of a key first: tiles of lanes, each with
            one scale or two, of its first 64 lanes and of the others.
            """

            def tiles(lanes, nth, count):
                for begin in range(lanes.start, lanes.stop, _WHOLE_LANES):
                    tile = slice(begin, min(begin + _WHOLE_LANES, lanes.stop))
                    size = min(count, 2 if tile.stop - begin > _LANES else 1)
                    yield tile, range(nth, nth + size)
                    nth, count = nth + size, count - size

            (num_first, _), (num_second, _) = page_format.groups
            keys, values = lanes_of(head)
            if page_format.values_in_keys:
                value_tiles = list(tiles(slice(0, C), 0, num_first))
                rotary = slice(C, page_format.key_width)  # scales are behind it
                return [*value_tiles, *tiles(rotary, num_first, num_second)], value_tiles
            first, second = num_first // K, num_second // K
            value_tiles = list(tiles(values, num_first + head * second, second))
            return list(tiles(keys, head * first, first)), value_tiles

        def numbers(stage, lanes):
            stored = jnp.float8_e4m3fn if page_format.dtype == "fp8" else jnp.int8
            return lax.bitcast_convert_type(ring[stage, :, lanes], stored).astype(q_ref.dtype)

        def scale(scales_XS, nth):
            at = page_format.element_bytes % _WHOLE_LANES + 2 * nth
            return scales_XS[at : at + 1]

        def is_first(x_UX):
            return lax.broadcasted_iota(jnp.int32, x_UX.shape, 1) < _LANES

        def keys_product(head, stage, scales_XS):
            """Queries times keys; a scale is a token's, so the product is scaled instead."""
            q_UH, (keys, _) = q_ref[0, head], lanes_of(head)
            if not page_format.is_quantized:
                return _dot(q_UH, page_rows.decode(ring[stage, :, keys]), 1)
            scores = []
            for lanes, scales in parts_of(head)[0]:
                q_UX = q_UH[:, lanes.start - keys.start : lanes.stop - keys.start]
                k_SX = numbers(stage, lanes)
                both = [q_UX]
                if len(scales) > 1:
                    both = [jnp.where(is_first(q_UX) == first, q_UX, 0) for first in (True, False)]
                for part_UX, nth in zip(both, scales, strict=True):
                    scores.append(_dot(part_UX, k_SX, 1) * scale(scales_XS, nth))
            return sum(scores[1:], scores[0])

        def values_product(head, stage, weights_US, scales_XS):
            """Weights times values; weights are scaled, since a scale is a token's."""
            if not page_format.is_quantized:
                v_SC = page_rows.decode(ring[stage, :, lanes_of(head)[1]])
                return _dot(weights_US.astype(v_SC.dtype), v_SC, 0)
            out = []
            for lanes, scales in parts_of(head)[1]:
                v_SX = numbers(stage, lanes)
                scaled = [(weights_US * scale(scales_XS, nth)).astype(v_SX.dtype) for nth in scales]
                both = [_dot(part_US, v_SX, 0) for part_US in scaled]
                out.append(jnp.where(is_first(both[0]), both[0], both[-1]))
            return jnp.concatenate(out, axis=1)

        def weigh(head, stage, mask_US, scales_XS):
            """A head's weights of a block, and how much what came before decays."""
            scores_US = soft_cap(keys_product(head, stage, scales_XS), score_cap)
            scores_US = jnp.where(mask_US, scores_US, _MASKED)
            old_UL = memory.maximum[head]
            maximum_UL = jnp.maximum(old_UL, scores_US.max(1, keepdims=True))
            decay_UL = jnp.exp(old_UL - maximum_UL)
            weights_US = jnp.exp(scores_US - _as_wide(maximum_UL, block_tokens))
            memory.maximum[head] = maximum_UL
            memory.mass[head] = memory.mass[head] * decay_UL + weights_US.sum(1, keepdims=True)
            return weights_US, decay_UL

        def add(head, stage, weights_US, decay_UL, scales_XS):
            added_UC = values_product(head, stage, weights_US, scales_XS)
            memory.values[head] = memory.values[head] * _as_wide(decay_UL, C) + added_UC

        @pl.when(b == 0)
        def _():
            cursor[0] = rows.next[0]
            cursor[1] = rows.start[jnp.minimum(rows.next[0], Z - 1)]
            cursor[2] = cursor[3] = 0

        memory.maximum[...] = jnp.broadcast_to(sinks_ref[...], memory.maximum.shape)
        memory.mass[...] = jnp.ones(memory.mass.shape, jnp.float32)
        memory.values[...] = jnp.zeros(memory.values.shape, jnp.float32)

        @pl.loop(0, pl.cdiv(rows.stop[b] - rows.start[b], block_pages))
        def _(i):
            fetch_ahead()
            stage, column = lax.rem(cursor[3], _STAGES), rows.start[b] + i * block_pages
            kv_position = column * page_tokens
            copies(b, column, stage, lambda copy: copy.wait())
            if appends:
                append(kv_position, stage)
            nth_US = lax.broadcasted_iota(jnp.int32, (num_rows, block_tokens), 1)
            kv_position_US = kv_position + nth_US
            bounds_UX = bounds_ref[0]
            fields_U1 = [bounds_UX[:, f : f + 1] for f in range(bounds_UX.shape[1])]
            bounds_U1 = jax.tree.unflatten(jax.tree.structure(bounds), fields_U1)
            mask_US = visible(kv_position_US, *bounds_U1)
            scales_XS = None
            if page_format.is_quantized:
                first = page_format.element_bytes // _WHOLE_LANES * _WHOLE_LANES
                scales_XS = _scales(ring[stage, :, first:X]).T
            weighed = [weigh(head, stage, mask_US, scales_XS) for head in range(K)]
            for head in range(K):
                weights_US, decay_UL = weighed[head]
                add(head, stage, weights_US, decay_UL, scales_XS)
            if appends:
                new_groups(kv_position)(lambda g: store(g, kv_position, stage).wait())
            cursor[3] += 1

        for head in range(K):
            out_UC = memory.values[head] / _as_wide(memory.mass[head], C)
            out_ref[0, head] = out_UC.astype(out_ref.dtype)
            if total_ref is not None:
                total_UL = memory.maximum[head] + jnp.log(memory.mass[head])
                total_ref[0, :, head : head + 1] = total_UL[:, :1]

    def of_row(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, *_: (b,) + (0,) * (x.ndim - 1))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = jax.ShapeDtypeStruct((Z, K, num_rows, C), jnp.float32 if has_totals else q_ZKUH.dtype)
    totals = jax.ShapeDtypeStruct((Z, num_rows, K), jnp.float32) if has_totals else None
    out_pages = jax.ShapeDtypeStruct(pages.shape, pages.dtype) if appends else None
    memory = _Memory(
        ring=pltpu.VMEM((_STAGES, block_tokens, X + padding), pages.dtype),
        arrived=pltpu.SemaphoreType.DMA((_STAGES,)),
        stored=pltpu.SemaphoreType.DMA,
        cursor=pltpu.SMEM((4,), jnp.int32),
        maximum=pltpu.VMEM((K, num_rows, _WHOLE_LANES), jnp.float32),
        mass=pltpu.VMEM((K, num_rows, _WHOLE_LANES), jnp.float32),
        values=pltpu.VMEM((K, num_rows, C), jnp.float32),
    )
    out_ZKUH, written, total_ZUK = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(Z,),
            in_specs=[
                of_row(q_ZKUH),
                of_row(bounds_ZUX),
                pl.BlockSpec(sinks_KU1.shape, lambda b, *_: (0, 0, 0)),
                jax.tree.map(of_row, new),
                anywhere,
            ],
            out_specs=[
                of_row(out),
                anywhere if appends else None,
                of_row(totals) if has_totals else None,
            ],
            scratch_shapes=[memory],
        ),
        out_shape=[out, out_pages, totals],
        input_output_aliases={len(rows) + 3 + len(jax.tree.leaves(new)): 1} if appends else {},
        # Tables have valid pages alone, and a check takes longer than the copy's start.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_VMEM_BYTES,
            disable_bounds_checks=True,
        ),
        name="paged_attention",
        interpret=interpret,
    )(rows, q_ZKUH, bounds_ZUX, sinks_KU1, new, pages)
    return out_ZKUH, total_ZUK, written if appends else pages


def _scales(bytes_SX):
    """Pairs of bytes as bfloat16 numbers: float32 [S, X], each where the first of its bytes is."""
    word_SX = bytes_SX.astype(jnp.int32)
    following_SX = pltpu.roll(word_SX, word_SX.shape[1] - 1, 1)
    return lax.bitcast_convert_type(word_SX << 16 | following_SX << 24, jnp.float32)


def _as_wide(x_UL, width: int):
    """Rows of equal lanes, as many as are needed."""
    return jnp.tile(x_UL, (1, pl.cdiv(width, _WHOLE_LANES)))[:, :width]


def _dot(x, y, contract: int):
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=exact, preferred_element_type=jnp.float32)
