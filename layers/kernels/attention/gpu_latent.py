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

More than 64 query heads are several tiles, neighbours in the grid: they read the same pages at the
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
from layers.kernels.attention import gpu_gather, hopper
from layers.kernels.attention.hopper import ROWS, SHARED_BYTES
from layers.kernels.attention.mask import MaskBounds

_KEY_PARTS, _VALUE_PARTS, _MOST_VALUES = 64, 128, 512
_READERS = 2  # warpgroups that share the value columns
# Registers a thread: 168 each at first, of which who fetches needs few.
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


def attend_splits(
    q_ZKUH: jax.Array,
    pages: jax.Array,
    table_ZP: jax.Array,
    bounds: MaskBounds,  # i32[Z, 64] each
    start_ZX: jax.Array,
    stop_ZX: jax.Array,
    *,
    value_width: int,
    is_whole: bool,
    num_stages: int,
    score_cap: float | None,
    beside: jax.Array | None,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of each split alone, as `gpu.py`'s: weighted values, float32 [Z, K, X, 64, C], and
    maximum (base 2) and mass of their weights, float32 [Z, K, X, 2, 64]; or, where a split
    `is_whole`, their quotient, in the pages' dtype, and None.
    """
    (Z, K, num_rows, H), X = q_ZKUH.shape, start_ZX.shape[1]
    is_chosen = pages.shape[1] == 1  # the table names single tokens
    page_tiles = pages.shape[1] // ROWS
    tile = (H,) if is_chosen else (ROWS, H)
    sources = [rows.reshape(-1, *tile) for rows in (pages, beside) if rows is not None]
    dtype, bounds_ZU = pages.dtype, jax.tree.leaves(bounds)
    width = value_width // _READERS

    def kernel(
        q_ref, table_ref, bounds_ref, start_ref, stop_ref, *refs,
        q_smem, bounds_smem, pages_smem, stats_smem, q_arrived, bounds_arrived, arrived, consumed,
    ):  # fmt: skip
        source_refs, (values_ref, *stats_refs) = refs[: len(sources)], refs[len(sources) :]
        b, split, tile = (lax.axis_index(name) for name in ("row", "split", "tile"))
        warpgroup = lax.axis_index("warpgroup")
        start, stop = start_ref[b, split], stop_ref[b, split]

        def stage_of(j):
            return lax.rem(j - start, jnp.int32(num_stages))

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
                sums, weights_US = hopper.weigh(sums, scores_US, j * ROWS, bounds_U, score_cap)
                values = pages_smem.at[stage, :, columns]
                sums = hopper.add_values(sums, weights_US, values, interpret)
                is_awaited = j + num_stages < stop
                pl.when(is_awaited)(lambda: plgpu.barrier_arrive(consumed.at[stage]))
                return sums

            sums = lax.fori_loop(start, stop, fold, hopper.no_sums(width))
            values_UH = hopper.quotient(sums) if is_whole else sums.values_UH
            # Straight out of registers: there is no room for it in shared memory.
            values_ref[b, tile, split, :, columns] = values_UH.astype(values_ref.dtype)
            if reader == 0:
                for stats_ref in stats_refs:
                    stats_smem[0], stats_smem[1] = sums.maximum_U, sums.mass_U
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[b, tile, split])
                    plgpu.wait_smem_to_gmem(0)

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
                    page = table_ref[b, lax.div(j, jnp.int32(page_tiles))]
                    nth = page * page_tiles + lax.rem(j, jnp.int32(page_tiles))
                    tokens = source_refs[0].at[nth]
                    plgpu.copy_gmem_to_smem(tokens, pages_smem.at[stage], arrived.at[stage])
                    return
                ids = table_ref.at[b, pl.ds(j * ROWS, ROWS)]
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
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((1, ROWS, H), dtype, transforms=tiles),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), ROWS), jnp.int32),
        pages_smem=plgpu.SMEM((num_stages, ROWS, H), dtype, transforms=tiles),
        stats_smem=plgpu.SMEM((2, ROWS), jnp.float32),
        q_arrived=plgpu.Barrier(),
        bounds_arrived=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_barriers=num_stages),
        consumed=plgpu.Barrier(num_arrivals=_READERS, num_barriers=num_stages),
    )
    values = jax.ShapeDtypeStruct((Z, K, X, ROWS, value_width), dtype if is_whole else jnp.float32)
    stats = jax.ShapeDtypeStruct((Z, K, X, 2, ROWS), jnp.float32)
    values_ZKXUC, *stats_ZKX2U = plgpu.kernel(
        kernel,
        out_type=(values,) if is_whole else (values, stats),
        scratch_types=scratch,
        grid=(Z, X, K),  # the last is the one whose neighbours run at the same time
        grid_names=("row", "split", "tile"),
        num_threads=_READERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_latent_attention",
        compiler_params=hopper.compiler_params(score_cap),
        interpret=interpret,
    )(q_ZKUH, table_ZP, jnp.stack(bounds_ZU, axis=1), start_ZX, stop_ZX, *sources)
    return values_ZKXUC, stats_ZKX2U[0] if stats_ZKX2U else None
