"""Attention over pages on TPUs (Pallas), fused with the append of the step's keys and values.

A row of the grid is a tile of one sequence's queries. Its pages come through a ring of blocks in
VMEM that is filled ahead of its use, across rows, so that a row need not wait for its first page;
pages that slid out of a window are skipped. A block is whole pages as they lie in memory: a head's
keys are columns of it and need no shuffle on their way to the matrix unit. The softmax is folded
over blocks (Milakov & Gimelshein 2018, arXiv 1805.02867).

The step's own keys and values are merged into the block that holds their places, which is there to
be read anyway, and leave from it in groups of tokens, since no copy reaches into a tile of memory.
A row that reads what an earlier one appends, as the tiles of one prompt do, is not fetched before
that one is done.

Letters beside the common ones: B rows of the grid, R query rows of one (`tiles.py`), S tokens of a
block, E = 2 K H elements of a token, A places that a row's groups of appended tokens span.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layers import kv_cache
from layers.kernels.attention.contract import PLAIN, Demand, Options
from layers.kernels.attention.mask import Sight, sight_of, visible
from layers.kernels.attention.tiles import Tiling, seen_pages
from layers.kernels.device import Device
from layers.linear import soft_cap
from layers.ragged import Rectangle

# v5e, v5p, v6e and 7x under the names that jax knows (jax/_src/pallas/mosaic/tpu_info.py).
KINDS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
_DTYPES = ("bfloat16", "float32")
_LANES = 64  # heads begin at multiples of it
_GROUP = 16  # tokens that are written at once: a whole number of tiles of either type
_ROWS = 8  # of a float32 tile
_TILE_BYTES = 12 << 20  # of queries, output and sums, unless a row must not be divided
_BLOCK_TOKENS, _BLOCK_BYTES = 512, 2 << 20  # of a block, at most, and at least a page
_STAGES = 3  # blocks on their way or in use
_VMEM_BYTES = 48 << 20  # of 64 MiB (7x) or 128
_TABLE_ENTRIES = 224 << 10  # that are kept in scalar memory, 896 KiB of 1 MiB
_MASKED = -1e30


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    if device.kind not in KINDS:
        return f"runs on TPU v5e, v5p, v6e and 7x, not on {device.kind}"
    if demand.deterministic:
        return "has not been measured to be deterministic"
    if demand.dtype not in _DTYPES:
        return f"reads pages of bfloat16 or float32, not {demand.dtype}: set model.dtype=bfloat16"
    if demand.page_tokens % _GROUP:
        return (
            f"reads pages of 16, 32, 64 or 128 tokens, not {demand.page_tokens}: "
            "set engine.page_tokens"
        )
    if demand.head_width % _LANES:
        return f"has heads of a multiple of {_LANES}, not {demand.head_width}"
    return table_limit(demand)


def table_limit(demand: Demand) -> str | None:
    """What is too much for scalar memory, which holds a rectangle's page tables as a whole."""
    if demand.table_entries <= _TABLE_ENTRIES:
        return None
    return (
        f"has room for page tables of {_TABLE_ENTRIES} entries, {demand.table_entries} are needed "
        "(sequences x pages): lower engine.max_seqs or engine.max_context, raise engine.page_tokens"
    )


def attend_pages(
    q_CWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    options: Options = PLAIN,
    *,
    interpret: Any = False,
) -> jax.Array:
    """`contract.AttendPages`, where the step's keys are written already; `interpret` takes
    `pltpu.InterpretParams`, to run anywhere.
    """
    return _attend(q_CWNH, None, pages, rectangle, group, options, interpret)[0]


def append_and_attend(
    q_CWNH: jax.Array,
    k_CWKH: jax.Array,
    v_CWKH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    options: Options = PLAIN,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AppendAndAttend`; `interpret` as in `attend_pages`."""
    kv_CWE = jnp.concatenate([k_CWKH, v_CWKH], axis=2).reshape(*q_CWNH.shape[:2], -1)
    return _attend(q_CWNH, kv_CWE, pages, rectangle, group, options, interpret)


def _attend(
    q_CWNH: jax.Array,
    kv_CWE: jax.Array | None,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    options: Options,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    (C, W, N, H), (_, page_tokens, E) = q_CWNH.shape, pages.shape
    K = E // (2 * H)
    G = N // K
    # Queries and float32 output come and go while others are used; sums take a lane row each.
    token_bytes = N * (H * (2 * q_CWNH.dtype.itemsize + 2 * 4 + 4) + 2 * 128 * 4)
    # A token that sees later ones needs them all in place.
    is_chain = rectangle.ancestors_CW is None and rectangle.causal_C is None
    width = min(W, max(1, _TILE_BYTES // token_bytes)) if is_chain else W
    tiling = Tiling(width, G, -(-width * G // _ROWS) * _ROWS)
    valid_BW, place_BW = tiling.split(rectangle.valid_CW), tiling.split(rectangle.place_CW)
    sight = jax.tree.map(tiling.split, sight_of(rectangle, options.window))
    table_BP = jnp.repeat(rectangle.tables[group], valid_BW.shape[0] // C, axis=0)
    place_B, count_B = place_BW[:, 0], valid_BW.sum(1, dtype=jnp.int32)
    start_B, stop_B = seen_pages(sight, valid_BW, page_tokens)
    new_BAE, waits_B = None, jnp.zeros_like(count_B)
    if kv_CWE is not None:
        new_BAE = _aligned(tiling.split(kv_cache.encode(kv_CWE, pages)), place_B)
        waits_B = _waits(table_BP, place_B // page_tokens, count_B)
    plan = _Plan(table_BP, start_B, stop_B, _next(stop_B > start_B), place_B, count_B, waits_B)
    sinks_N = jnp.full(N, _MASKED, jnp.float32) if options.sinks_N is None else options.sinks_N
    out_BKRH, pages = _attend_tiles(
        plan, tiling.pack(q_CWNH), jax.tree.map(tiling.spread, sight), tiling.sinks(sinks_N),
        new_BAE, pages, options.score_cap, interpret,
    )  # fmt: skip
    return tiling.unpack(out_BKRH, q_CWNH.shape), pages


def _aligned(kv_BWE: jax.Array, place_B: jax.Array) -> jax.Array:
    """A row's tokens where they lie in the groups that hold its first place and those after:
    [B, A, E].
    """
    width = kv_BWE.shape[1]
    num_groups = (width + 2 * _GROUP - 2) // _GROUP
    nth_BA = jnp.arange(num_groups * _GROUP) - place_B[:, None] % _GROUP
    return jnp.take_along_axis(kv_BWE, jnp.clip(nth_BA, 0, width - 1)[:, :, None], axis=1)


def _waits(table_BP: jax.Array, column_B: jax.Array, count_B: jax.Array) -> jax.Array:
    """Whether a row reads what an earlier one appends, i32[B]: a page that is written belongs to
    one sequence, so rows that have the same one in its column are of the same.
    """
    page_BB = jnp.take(table_BP, column_B, axis=1)  # [reader, writer]
    is_same_BB = (page_BB == jnp.diagonal(page_BB)) & (count_B > 0)
    return jnp.tril(is_same_BB, -1).any(1).astype(jnp.int32)


def _next(has_pages_B: jax.Array) -> jax.Array:
    """The first row that has pages, and the next after each: i32[B + 1], B for none."""
    B = has_pages_B.shape[0]
    row_B = jnp.where(has_pages_B, jnp.arange(B, dtype=jnp.int32), B)
    return jnp.append(lax.cummin(row_B, reverse=True), jnp.int32(B))


# --- the kernel -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What is known of each row before it is read, i32 in scalar memory."""

    table: Any  # [B, P]
    start: Any  # [B]: the first column of the table that is read
    stop: Any  # [B]: and after the last
    next: Any  # [B + 1]: `_next`
    place: Any  # [B]: where the first of its tokens lies
    count: Any  # [B]: its tokens
    waits: Any  # [B]: whether it reads what an earlier row appends


class _Memory(NamedTuple):
    """What outlives a row (the ring and its cursor), and the sums of a row's softmax."""

    ring: Any  # [stages, S, E]
    arrived: Any  # semaphore a stage
    stored: Any  # semaphore
    cursor: Any  # i32[4]: row and column of the next block to fetch; blocks fetched, blocks used
    maximum: Any  # f32[K, R, 1]
    mass: Any  # f32[K, R, 1]
    values: Any  # f32[K, R, H]


def _attend_tiles(
    plan: _Plan,
    q_BKRH: jax.Array,
    sight: Sight,  # i32[B, R] each
    sinks_KR: jax.Array,
    new_BAE: jax.Array | None,
    pages: jax.Array,
    score_cap: float | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Float32 [B, K, R, H], and the pages with what is new."""
    (B, K, num_rows, H), (_, page_tokens, E) = q_BKRH.shape, pages.shape
    page_bytes = page_tokens * E * pages.dtype.itemsize
    block_pages = max(1, min(_BLOCK_TOKENS // page_tokens, _BLOCK_BYTES // page_bytes))
    block_tokens = block_pages * page_tokens
    appends = new_BAE is not None
    # Columns, to be compared with rows of places.
    sight_BRF, sinks_KR1 = jnp.stack(jax.tree.leaves(sight), axis=2), sinks_KR[:, :, None]

    def kernel(
        plan, q_ref, sight_ref, sinks_ref, new_ref, pages_ref, out_ref, written_ref, memory
    ):  # fmt: skip
        ring, cursor = memory.ring, memory.cursor
        pages_ref = written_ref if appends else pages_ref  # the same pages, as they come to be
        b = pl.program_id(0)

        def copies(row, column, stage, act):
            """Starts or awaits the copies of a block's pages."""

            @pl.loop(0, jnp.minimum(block_pages, plan.stop[row] - column))
            def _(i):
                at = pl.ds(pl.multiple_of(i * page_tokens, _GROUP), page_tokens)
                page = pages_ref.at[plan.table[row, column + i]]
                act(pltpu.make_async_copy(page, ring.at[stage, at], memory.arrived.at[stage]))

        def fetch_ahead():
            """Fills the stages that nothing is on its way to."""

            @pl.loop(0, _STAGES - (cursor[2] - cursor[3]))
            def _fetch(_):
                row, column, num_fetched = cursor[0], cursor[1], cursor[2]
                known = jnp.minimum(row, B - 1)

                @pl.when((row < B) & ((row <= b) | (plan.waits[known] == 0)))
                def _start():
                    copies(row, column, lax.rem(num_fetched, _STAGES), lambda copy: copy.start())
                    is_last = column + block_pages >= plan.stop[row]
                    following = plan.next[row + 1]
                    after = plan.start[jnp.minimum(following, B - 1)]
                    cursor[0] = jnp.where(is_last, following, row)
                    cursor[1] = jnp.where(is_last, after, column + block_pages)
                    cursor[2] = num_fetched + 1

        def new_groups(place):
            """Groups of the block that begins at a place which hold tokens of the row."""
            begin, end = plan.place[b], plan.place[b] + plan.count[b]
            last = jnp.minimum(pl.cdiv(end, _GROUP), (place + block_tokens) // _GROUP)
            return pl.loop(jnp.maximum(begin, place) // _GROUP, last)

        def store(g, place, stage):
            """The copy of a group from the block that begins at a place to its page."""
            inside = pl.ds(pl.multiple_of(g * _GROUP - place, _GROUP), _GROUP)
            page = plan.table[b, g * _GROUP // page_tokens]
            to = pl.ds(pl.multiple_of(lax.rem(g * _GROUP, page_tokens), _GROUP), _GROUP)
            return pltpu.make_async_copy(
                ring.at[stage, inside], pages_ref.at[page, to], memory.stored
            )

        def append(place, stage):
            """Merges the row's tokens into the block that begins at a place, and starts to store
            them.
            """
            begin = plan.place[b]

            @new_groups(place)
            def _(g):
                inside = pl.ds(pl.multiple_of(g * _GROUP - place, _GROUP), _GROUP)
                source = pl.ds(pl.multiple_of((g - begin // _GROUP) * _GROUP, _GROUP), _GROUP)
                place_GE = g * _GROUP + lax.broadcasted_iota(jnp.int32, (_GROUP, E), 0)
                is_new_GE = (place_GE >= begin) & (place_GE < begin + plan.count[b])
                old_GE = ring[stage, inside]
                ring[stage, inside] = jnp.where(is_new_GE, new_ref[0, source], old_GE)
                store(g, place, stage).start()

        def fold(head, stage, mask_RS):
            """One step of a head's softmax, over a block."""
            k_SH = kv_cache.decode(ring[stage, :, head * H : (head + 1) * H])
            v_SH = kv_cache.decode(ring[stage, :, (K + head) * H : (K + head + 1) * H])
            scores_RS = _dot(q_ref[0, head], k_SH, 1)
            scores_RS = scores_RS if score_cap is None else soft_cap(scores_RS, score_cap)
            scores_RS = jnp.where(mask_RS, scores_RS, _MASKED)
            old_R1 = memory.maximum[head]
            maximum_R1 = jnp.maximum(old_R1, scores_RS.max(1, keepdims=True))
            decay_R1 = jnp.exp(old_R1 - maximum_R1)
            weights_RS = jnp.exp(scores_RS - maximum_R1)
            memory.maximum[head] = maximum_R1
            memory.mass[head] = memory.mass[head] * decay_R1 + weights_RS.sum(1, keepdims=True)
            added_RH = _dot(weights_RS.astype(v_SH.dtype), v_SH, 0)
            memory.values[head] = memory.values[head] * decay_R1 + added_RH

        @pl.when(b == 0)
        def _():
            ring[...] = jnp.zeros(ring.shape, ring.dtype)  # masked values are multiplied by 0
            cursor[0] = plan.next[0]
            cursor[1] = plan.start[jnp.minimum(plan.next[0], B - 1)]
            cursor[2] = cursor[3] = 0

        memory.maximum[...] = sinks_ref[...]
        memory.mass[...] = jnp.ones(memory.mass.shape, jnp.float32)
        memory.values[...] = jnp.zeros(memory.values.shape, jnp.float32)

        @pl.loop(0, pl.cdiv(plan.stop[b] - plan.start[b], block_pages))
        def _(i):
            fetch_ahead()
            stage, column = lax.rem(cursor[3], _STAGES), plan.start[b] + i * block_pages
            place = column * page_tokens
            copies(b, column, stage, lambda copy: copy.wait())
            if appends:
                append(place, stage)
            place_RS = place + lax.broadcasted_iota(jnp.int32, (num_rows, block_tokens), 1)
            sight_RF = sight_ref[0]
            fields_R1 = [sight_RF[:, f : f + 1] for f in range(sight_RF.shape[1])]
            mask_RS = visible(place_RS, *jax.tree.unflatten(jax.tree.structure(sight), fields_R1))
            for head in range(K):
                fold(head, stage, mask_RS)
            if appends:
                new_groups(place)(lambda g: store(g, place, stage).wait())
            cursor[3] += 1

        for head in range(K):
            out_ref[0, head] = memory.values[head] / memory.mass[head]

    def of_row(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, *_: (b,) + (0,) * (x.ndim - 1))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = jax.ShapeDtypeStruct(q_BKRH.shape, jnp.float32)
    out_pages = jax.ShapeDtypeStruct(pages.shape, pages.dtype) if appends else None
    memory = _Memory(
        ring=pltpu.VMEM((_STAGES, block_tokens, E), pages.dtype),
        arrived=pltpu.SemaphoreType.DMA((_STAGES,)),
        stored=pltpu.SemaphoreType.DMA,
        cursor=pltpu.SMEM((4,), jnp.int32),
        maximum=pltpu.VMEM((K, num_rows, 1), jnp.float32),
        mass=pltpu.VMEM((K, num_rows, 1), jnp.float32),
        values=pltpu.VMEM((K, num_rows, H), jnp.float32),
    )
    out_BKRH, written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B,),
            in_specs=[
                of_row(q_BKRH),
                of_row(sight_BRF),
                pl.BlockSpec(sinks_KR1.shape, lambda b, *_: (0, 0, 0)),
                of_row(new_BAE) if appends else None,
                anywhere,
            ],
            out_specs=[of_row(out), anywhere if appends else None],
            scratch_shapes=[memory],
        ),
        out_shape=[out, out_pages],
        input_output_aliases={len(plan) + 4: 1} if appends else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES
        ),
        name="paged_attention",
        interpret=interpret,
    )(plan, q_BKRH, sight_BRF, sinks_KR1, new_BAE, pages)
    return out_BKRH, written if appends else pages


def _dot(x, y, contract: int):
    """Contracts axis 1 of x with axis `contract` of y; float32."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=exact, preferred_element_type=jnp.float32)
