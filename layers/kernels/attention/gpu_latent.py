"""Attention over pages of latents on Hopper GPUs (Pallas, Mosaic GPU): the absorbed form of
multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), where all heads read one row a
token, whose first C elements are the value too.

It differs from `gpu.py` in where the sums are: 64 rows of 512 float32 are twice what the registers
of one warpgroup hold. So

* two warpgroups read the same pages in shared memory, and each has half of the value columns. A
  latent is fetched once for both, and its value is a part of the key as that lies there;
* both compute all scores. That is half as much arithmetic again, and spares them every exchange:
  the softmax of one runs beside the products of the other;
* a third fetches, as soon as both are done with an earlier page.

More than 64 query heads are several tiles, neighbors in the grid: they read the same pages at the
same time, so that all but the first find them in the device's own cache.

Z counts rows of the kernel's grid, K tiles of heads, U the query rows of a tile, X splits, H the
elements of a latent.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.cache import PageFormat
from layers.kernels.attention import gpu_gather, hopper, splits
from layers.kernels.attention.hopper import ROWS, SHARED_BYTES
from layers.kernels.attention.mask import MaskBounds
from layers.kernels.attention.tiles import Tiling

_KEY_PARTS, _VALUE_PARTS, _MOST_VALUES = 64, 128, 512
_OUT_WIDTH = 16  # columns of the result that leave at once
_READERS = 2  # warpgroups that share the value columns
# Registers a thread: 168 at first; the warpgroup that fetches needs few.
_READER_REGISTERS, _FETCHER_REGISTERS = 232, 40


def limit(num_heads: int, page_format: PageFormat) -> str | None:
    """What is no format of latents that the kernel reads: a phrase as `contract.Limit`'s."""
    H, C = page_format.key_width, page_format.value_width
    if C % _VALUE_PARTS or C > _MOST_VALUES:
        return f"has latents of a multiple of {_VALUE_PARTS} up to {_MOST_VALUES}, not {C}"
    if H % _KEY_PARTS:
        return f"has latents with rotary keys of a multiple of {_KEY_PARTS}, not {H - C}"
    if num_heads % head_tiles(num_heads):
        return f"divides query heads evenly over tiles of at most {ROWS}, not {num_heads}"
    if most_stages(H) < 2:
        return f"has no room for latents of {C} elements beside rotary keys of {H - C}"
    return None


def head_tiles(num_heads: int) -> int:
    """Tiles that query heads are divided over."""
    return -(-num_heads // ROWS)


def most_stages(width: int) -> int:
    """Pages that a block's shared memory has room for beside its queries."""
    fixed_bytes = 2 * ROWS * width + (4 << 10)  # bounds, statistics, alignment
    return (SHARED_BYTES - fixed_bytes) // (2 * ROWS * width)


def stores_tokens(group: int) -> bool:
    """Whether the rows of each token of a tile begin on a line of the shared memory by way of which
    they leave, as copies do.
    """
    return group * _OUT_WIDTH * 2 % 128 == 0


def attend_splits(
    q_ZKUH: jax.Array,
    pages: jax.Array,
    ranges: splits.PageRanges,
    bounds: MaskBounds,  # i32[Z, 64] each
    sinks_N: jax.Array | None,
    *,
    head_pages: int,
    tiling: Tiling,
    shape: tuple[int, ...],
    num_stages: int,
    score_cap: float | None,
    entry_pages: jax.Array | None,
    has_totals: bool,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of tiles of queries, [Y, W, N, C], and statistics, as `gpu.py`'s."""
    (Z, K, num_rows, H), X = q_ZKUH.shape, ranges.start_ZX.shape[1]
    is_chosen = pages.shape[1] == 1  # the table names single tokens
    page_tiles = pages.shape[1] // ROWS
    tile = (H,) if is_chosen else (ROWS, H)
    sources = [rows.reshape(-1, *tile) for rows in (pages, entry_pages) if rows is not None]
    dtype, bounds_ZU = pages.dtype, jax.tree.leaves(bounds)
    out_dtype = jnp.dtype(jnp.float32 if has_totals else dtype)
    width = shape[-1] // _READERS
    slice_width = splits.slice_width(width, X, tiling)
    is_split = X > 1
    q = splits.with_counts(q_ZKUH) if is_split else q_ZKUH

    def kernel(
        q_ref, source_refs, ranges_ref, bounds_ref, sinks_ref, out_ref, part_refs, *,
        q_smem, bounds_smem, pages_smem, out_smem, q_arrived, bounds_arrived, arrived, consumed,
    ):  # fmt: skip
        hopper.begin(interpret)
        b, split, tile = (lax.axis_index(name) for name in ("row", "split", "tile"))
        warpgroup = lax.axis_index("warpgroup")
        start, stop = ranges_ref.start_ZX[b, split], ranges_ref.stop_ZX[b, split]

        def stage_of(j):
            return lax.rem(j - start, jnp.int32(num_stages))

        def column(j):
            return ranges_ref.column(b, j, head_pages)

        def read(reader):
            plgpu.set_max_registers(_READER_REGISTERS, action="increase")
            plgpu.barrier_wait(q_arrived)
            plgpu.barrier_wait(bounds_arrived)
            columns = pl.ds(reader * width, width)

            def fold(j, sums):
                stage = stage_of(j)
                plgpu.barrier_wait(arrived.at[stage])
                # Index 0, which the compiler does not know. It would keep the addresses of all
                # parts of the queries in registers, from page to page, and spill.
                q = q_smem.at[jnp.minimum(j, 0)]
                scores_US = hopper.scores(q, pages_smem.at[stage], interpret)
                fields_U = [bounds_smem[i] for i in range(len(bounds_ZU))]
                bounds_U = jax.tree.unflatten(jax.tree.structure(bounds), fields_U)
                kv_position = column(j) * ROWS
                sums, weights_US = hopper.weigh(sums, scores_US, kv_position, bounds_U, score_cap)
                values = pages_smem.at[stage, :, columns]
                sums = hopper.add_values(sums, weights_US, values, interpret)
                is_awaited = j + num_stages < stop
                pl.when(is_awaited)(lambda: plgpu.barrier_arrive(consumed.at[stage]))
                return sums

            def store(sums, first_column):
                if sinks_ref is not None:
                    sums = splits.with_sinks(sums, sinks_ref, tiling, tile)
                tokens = splits.tokens(tiling, shape, b, tile)
                first_column += reader * width
                tokens.store(out_ref, first_column, hopper.quotient(sums), out_smem.at[reader])

            sums = lax.fori_loop(start, stop, fold, hopper.no_sums(width))
            pair, (values_ref, stats_ref) = (b * K + tile) * _READERS + reader, part_refs
            # Straight out of registers: there is no room for them in shared memory.
            if stats_ref is not None:
                stats_ref[pair, split, 0] = sums.maximum_U
                stats_ref[pair, split, 1] = sums.mass_U
            if not is_split:
                store(sums, 0)
                return
            parts = splits.Parts(values_ref, stats_ref)
            parts.values[pl.ds((pair * X + split) * ROWS, ROWS)] = sums.values_UH

            def combine(i):
                columns = i * slice_width, slice_width
                store(splits.combined(parts, pair, ROWS, columns, interpret), columns[0])

            count_ref = splits.count(q_ref, Z, b, tile, reader)
            splits.combine(count_ref, split, X, width // slice_width, combine, interpret)

        def fetch():
            plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[b, tile], q_smem.at[0, pl.ds(0, num_rows)], q_arrived)
            plgpu.copy_gmem_to_smem(bounds_ref.at[b], bounds_smem, bounds_arrived)

            @pl.loop(start, stop)
            def _(j):
                stage = stage_of(j)

                @pl.when(j - start >= num_stages)
                def _():
                    plgpu.barrier_wait(consumed.at[stage])

                if not is_chosen:
                    nth = column(j)
                    page = ranges_ref.table_ZP[b, lax.div(nth, jnp.int32(page_tiles))]
                    nth = page * page_tiles + lax.rem(nth, jnp.int32(page_tiles))
                    tokens = source_refs[0].at[nth]
                    plgpu.copy_gmem_to_smem(tokens, pages_smem.at[stage], arrived.at[stage])
                    return
                ids = ranges_ref.table_ZP.at[b, pl.ds(column(j) * ROWS, ROWS)]
                gpu_gather.start(ids, tuple(source_refs), pages_smem.at[stage], interpret)

                @pl.when(j > start)
                def _():
                    gpu_gather.wait(1, interpret)
                    plgpu.barrier_arrive(arrived.at[stage_of(j - 1)])

            if is_chosen:

                @pl.when(stop > start)
                def _():
                    gpu_gather.wait(0, interpret)
                    plgpu.barrier_arrive(arrived.at[stage_of(stop - 1)])

        for reader in range(_READERS):
            pl.when(warpgroup == reader)(functools.partial(read, reader))
        pl.when(warpgroup == _READERS)(fetch)

    tiles = hopper.operand_layout(dtype)
    most_columns = 2 * _OUT_WIDTH // out_dtype.itemsize
    out_part = max(n for n in range(8, most_columns + 1, 8) if slice_width % n == 0)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((1, ROWS, H), dtype, transforms=tiles),
        pages_smem=plgpu.SMEM((num_stages, ROWS, H), dtype, transforms=tiles),
        out_smem=plgpu.SMEM((_READERS, ROWS, out_part), out_dtype),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), ROWS), jnp.int32),
        q_arrived=plgpu.Barrier(),
        bounds_arrived=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_barriers=num_stages),
        consumed=plgpu.Barrier(num_arrivals=_READERS, num_barriers=num_stages),
    )
    parts = splits.part_types(Z * K * _READERS, X, ROWS, width, has_totals)
    mesh = plgpu.Mesh(
        grid=(Z, X, K),  # the last is the one whose neighbors run at the same time
        grid_names=("row", "split", "tile"),
        num_threads=_READERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_latent_attention",
    )
    out_types = jax.ShapeDtypeStruct(shape, out_dtype), parts
    out_YWNC, (_, stats) = hopper.launch(kernel, out_types, mesh, scratch, score_cap, interpret)(
        q, sources, ranges, jnp.stack(bounds_ZU, axis=1), sinks_N
    )
    return out_YWNC, stats if stats is None else stats[::_READERS]  # both readers have the same
