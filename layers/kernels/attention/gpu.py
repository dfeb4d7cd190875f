"""Attention over pages on Hopper GPUs (Pallas, Mosaic GPU): made for decoding, where a row has few
query tokens and its whole context is read for them.

Such a kernel is as good as its memory traffic. So

* a block of threads (one warpgroup) belongs to a row, a KV head and a split of the row's pages, and
  reads each key and value once: every query head and token that sees them is one of the 64 rows of
  a tensor-core tile (wgmma);
* a page's keys of a head are one box of the copy engine (TMA), [page tokens, H] out of [pages, page
  tokens, 2 K H], its values another; further pages are on their way while one is used;
* where rows are few, their pages are split over blocks until every multiprocessor has work. A split
  keeps its own maximum, mass and values (online softmax, Milakov & Gimelshein 2018, arXiv
  1805.02867), which the splits of a row combine in the same launch (`splits.py`);
* the result leaves as the next product reads it: [Y, W, N, H], in the pages' dtype.

The step's keys and values are already in the pages (`append_gpu.py`, or `page_rows.write`).

Latents have a kernel of their own (`gpu_latent.py`), which takes the place of this one's blocks.
So have prompts (`gpu_prefill.py`), where time is the tensor core's, and quantized pages
(`gpu_quantized.py`).

Z counts rows of the kernel's grid, U the query rows of a tile (W G of them are used), X splits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels import tuning
from layers.kernels.attention import (
    contract,
    gpu_index,
    gpu_latent,
    gpu_prefill,
    gpu_quantized,
    hopper,
    hopper_pages,
    splits,
)
from layers.kernels.attention.contract import PLAIN, Demand, Options, Stretch
from layers.kernels.attention.hopper import ROWS, SHARED_BYTES
from layers.kernels.attention.mask import MaskBounds, mask_bounds
from layers.kernels.attention.tiles import Tiling, page_shares, visible_pages
from layers.kernels.device import Device, target_device
from layers.ragged import Ragged, Rectangle

_MOVED_ROWS = 8  # of a tile in shared memory: what is copied comes in multiples
_PAGE_TOKENS, _HEAD_WIDTHS = (64, 128), (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
# Columns that leave at once: few, so that a multiprocessor has room for two blocks of two stages.
# They come out of registers 64 rows at a time, whatever number of them leaves.
_OUT_WIDTH = 64


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    page_format, page_tokens = demand.page_format, demand.page_tokens
    K, H, dtype = page_format.kv_heads, page_format.key_width, page_format.dtype
    if not device.is_hopper:
        return f"runs on Hopper GPUs (H100, H200), not on {device.kind}"
    if demand.deterministic:
        return "has not been measured to be deterministic"
    if page_format.is_quantized:
        return gpu_quantized.limit(demand)
    page_entries = page_tokens // demand.stride
    if demand.index_width and (reason := gpu_index.limit(demand.index_width, page_entries)):
        return reason
    if dtype not in _DTYPES:
        return f"reads pages of {' or '.join(_DTYPES)}, not {dtype}: set model.dtype=bfloat16"
    if page_tokens not in _PAGE_TOKENS:
        return f"reads pages of 64 or 128 tokens, not {page_tokens}: set engine.cache.page_tokens"
    if page_format.values_in_keys:
        return gpu_latent.limit(demand.num_heads, page_format)
    if (reason := contract.uneven_limit(page_format)) is not None:
        return reason
    if H not in _HEAD_WIDTHS:
        return f"has heads of 64, 128 or 256, not {H}"
    if demand.num_heads > ROWS * K:
        return f"has at most {ROWS} query heads a KV head, not {demand.num_heads // K}"
    if most_stages(page_tokens, H, jnp.dtype(dtype).itemsize) < 2:
        return f"has no room for pages of {page_tokens} tokens with heads of {H}: 64 tokens fit"
    return None


def layout(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """Token-major pages; of quantized rows as `hopper_pages` has them."""
    if not page_format.is_quantized:
        return page_rows.token_major(num_pages, page_tokens, page_format)
    shape = num_pages, page_tokens, hopper_pages.words(page_format.stored_width)
    return jax.ShapeDtypeStruct(shape, jnp.uint16)


def write(pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """`contract.Write`."""
    if row_TX.dtype == jnp.uint8:
        row_TX = hopper_pages.pack(row_TX)
    return page_rows.write(pages, row_TX, ragged, group)


def default_sizes(num_blocks: int, max_stages: int, device: Device) -> dict[str, int]:
    """Sizes for untuned shapes, by the pairs of row and KV head, and the stages that fit."""
    return {"num_splits": max(1, device.num_cores // num_blocks), "num_stages": min(4, max_stages)}


def most_stages(page_tokens: int, head_width: int, itemsize: int) -> int:
    """Pages that a block's shared memory has room for beside its queries, part and result."""
    fixed_bytes = ROWS * (head_width * itemsize + _OUT_WIDTH * (4 + itemsize))
    fixed_bytes += 8 << 10  # positions, statistics, alignment
    return (SHARED_BYTES - fixed_bytes) // (2 * page_tokens * head_width * itemsize)


def attend_pages(
    q_YWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    num_splits: int | None = None,
    num_stages: int | None = None,
    entry_pages: jax.Array | None = None,
    interpret: object = None,
) -> jax.Array:
    """`contract.AttendPages`; `limit` refuses `options.deterministic`. No pages are read for tokens
    that are not valid.

    A row with more query tokens than a tile is several rows of the grid, which read its pages once
    each, or several tiles of `gpu_prefill.py` where these are enough for the device.

    Args:
        num_splits: blocks that share the pages of a row and KV head; None: the tuned number, else
            as many as fill the device.
        num_stages: pages that a block is loading or using, at most `most_stages`; None: the tuned
            number, else 4 where they fit. With 2, two blocks may share a multiprocessor.
        entry_pages: pages of entries, one latent each; a table of single latents names row r of
            them by ~r.
        interpret: `InterpretGPUParams`: interpreted, on any device.
    """
    bounds = mask_bounds(rectangle, options.window, options.chunked, options.first_tokens)
    out_YWNH, _ = _attend(
        q_YWNH, Stretch(pages, rectangle.tables[group], bounds), rectangle.valid_YW, page_format,
        options, num_splits, num_stages, entry_pages, interpret,
    )  # fmt: skip
    return out_YWNH if out_YWNH.dtype == options.dtype else out_YWNH.astype(jnp.float32)


def attend_part(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    num_splits: int | None = None,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """`contract.AttendPart`; further arguments are `attend_pages`'."""
    out_YWNH, total_YWN = _attend(
        q_YWNH, stretch, valid_YW, page_format, options, num_splits, None, None, interpret,
        has_totals=True,
    )  # fmt: skip
    assert total_YWN is not None
    return out_YWNH.astype(jnp.float32), total_YWN


def _attend(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options,
    num_splits: int | None,
    num_stages: int | None,
    entry_pages: jax.Array | None,
    interpret: object,
    has_totals: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention [Y, W, N, H] of float32 or of the pages' dtype, and log-sum-exps [Y, W, N]."""
    (Y, W, N, H), is_latent, device = q_YWNH.shape, page_format.values_in_keys, target_device()
    pages, table_YP, bounds = stretch
    if page_format.is_quantized:
        return gpu_quantized.attend(
            q_YWNH, stretch, valid_YW, page_format, options, num_splits, num_stages, interpret,
            has_totals,
        )  # fmt: skip
    page_tokens = ROWS if is_latent else pages.shape[1]  # latents of any pages are read in tiles
    if num_splits is None and num_stages is None and not is_latent:
        K = page_format.kv_heads
        if gpu_prefill.suits(q_YWNH.shape, K, device):
            return gpu_prefill.attend(q_YWNH, stretch, valid_YW, K, options, interpret, has_totals)
    K = gpu_latent.head_tiles(N) if is_latent else page_format.kv_heads
    G = N // K
    width = min(W, ROWS // G)  # query tokens of a tile
    if is_latent and not gpu_latent.stores_tokens(G):
        width = 1
    tiling = Tiling(width, G, -(-width * G // _MOVED_ROWS) * _MOVED_ROWS)
    valid_ZW = tiling.split(valid_YW)
    bounds, Z = jax.tree.map(tiling.split, bounds), len(valid_ZW)
    head_pages = -(-options.first_tokens // page_tokens)
    shape_class = tuning.attention_class(Z, K, H, page_tokens)
    if is_latent:
        max_stages = gpu_latent.most_stages(H)
    else:
        max_stages = most_stages(page_tokens, H, pages.dtype.itemsize)
    sizes = default_sizes(Z * K, max_stages, device)
    sizes |= tuning.sizes("pallas_gpu", device, shape_class)
    neighbors = K if is_latent else 1  # blocks in the grid between those of a tile
    most_pages = max(1, table_YP.shape[-1] * pages.shape[1] // page_tokens)
    num_splits = num_splits or min(
        sizes["num_splits"], splits.most_splits(neighbors, device), most_pages
    )
    attend = _attend_splits
    if is_latent:
        attend = functools.partial(
            gpu_latent.attend_splits,
            entry_pages=None if entry_pages is None else page_rows.decode(entry_pages),
        )
    shape = Y, W, N, page_format.value_width
    out_YWNH, stats = attend(
        tiling.pack(q_YWNH), page_rows.decode(pages),
        _split_pages(
            jnp.repeat(table_YP, Z // Y, axis=0), bounds, valid_ZW, page_tokens, head_pages,
            num_splits,
        ),
        jax.tree.map(lambda x_ZW: tiling.spread(x_ZW, ROWS), bounds), options.sinks_N,
        head_pages=head_pages, tiling=tiling, shape=shape,
        num_stages=num_stages or min(sizes["num_stages"], max_stages),
        score_cap=options.score_cap, has_totals=has_totals, interpret=interpret,
    )  # fmt: skip
    if not has_totals:
        return out_YWNH, None
    assert stats is not None
    return out_YWNH, splits.totals(stats, shape, tiling)


def _split_pages(
    table_ZP: jax.Array, bounds: MaskBounds, valid_ZW: jax.Array, page_tokens: int,
    head_pages: int, num_splits: int,
) -> splits.PageRanges:  # fmt: skip
    """The pages that valid tokens see; of those between the first tokens' and the window none."""
    first_Z, stop_Z = visible_pages(bounds, valid_ZW, page_tokens)
    skipped_Z = None
    if head_pages:
        skipped_Z = jnp.maximum(jnp.minimum(first_Z, stop_Z) - head_pages, 0)
        first_Z, stop_Z = jnp.zeros_like(first_Z), stop_Z - skipped_Z
    return splits.PageRanges(table_ZP, *page_shares(first_Z, stop_Z, num_splits), skipped_Z)


# --- the kernel -----------------------------------------------------------------------------------


def _attend_splits(
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
    has_totals: bool,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of tiles of queries, [Y, W, N, H] as `shape` has it, in the pages' dtype, and where
    there are some the statistics of `splits.Parts`. With totals it is float32, as others are added.
    """
    (Z, K, num_rows, H), page_tokens, X = q_ZKUH.shape, pages.shape[1], ranges.start_ZX.shape[1]
    dtype, bounds_ZU = pages.dtype, jax.tree.leaves(bounds)
    out_dtype = jnp.dtype(jnp.float32 if has_totals else dtype)
    slice_width = splits.slice_width(H, X, tiling)
    is_split = X > 1
    q = splits.with_counts(q_ZKUH) if is_split else q_ZKUH

    def kernel(
        q_ref, pages_ref, ranges_ref, bounds_ref, sinks_ref, out_ref, part_refs, *,
        q_smem, bounds_smem, keys_smem, values_smem, out_smem,
        q_arrived, bounds_arrived, keys_arrived, values_arrived, part_smem=None, stats_smem=None,
    ):  # fmt: skip
        hopper.begin(interpret)
        b, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        start, stop = ranges_ref.start_ZX[b, split], ranges_ref.stop_ZX[b, split]

        def column(j):
            return ranges_ref.column(b, j, head_pages)

        def page_of(j):
            return ranges_ref.page(b, head, column(j))

        def fetch(page, stage):
            for part, target, arrived in (
                (head, keys_smem, keys_arrived),
                (K + head, values_smem, values_arrived),
            ):
                box = pages_ref.at[page, :, pl.ds(part * H, H)]
                plgpu.copy_gmem_to_smem(box, target.at[stage], arrived.at[stage])

        plgpu.copy_gmem_to_smem(q_ref.at[b, head], q_smem.at[pl.ds(0, num_rows)], q_arrived)
        plgpu.copy_gmem_to_smem(bounds_ref.at[b], bounds_smem, bounds_arrived)
        num_first = jnp.minimum(stop - start, num_stages)
        pl.loop(0, num_first)(lambda stage: fetch(page_of(start + stage), stage))
        plgpu.barrier_wait(q_arrived)
        plgpu.barrier_wait(bounds_arrived)
        fields_U = [bounds_smem[i] for i in range(len(bounds_ZU))]
        bounds_U = jax.tree.unflatten(jax.tree.structure(bounds), fields_U)

        def fold(j, carry):
            stage, sums = carry
            ahead = j + num_stages
            page = page_of(jnp.minimum(ahead, stop - 1))  # read long before it is used
            plgpu.barrier_wait(keys_arrived.at[stage])
            scores_US = hopper.scores(q_smem, keys_smem.at[stage], interpret)
            kv_position = column(j) * page_tokens
            sums, weights_US = hopper.weigh(sums, scores_US, kv_position, bounds_U, score_cap)
            plgpu.barrier_wait(values_arrived.at[stage])
            sums = hopper.add_values(sums, weights_US, values_smem.at[stage], interpret)
            pl.when(ahead < stop)(lambda: fetch(page, stage))
            return jnp.where(stage == num_stages - 1, 0, stage + 1), sums

        def store(sums, first_column):
            if sinks_ref is not None:
                sums = splits.with_sinks(sums, sinks_ref, tiling, head)
            tokens = splits.tokens(tiling, shape, b, head)
            tokens.store(out_ref, first_column, hopper.quotient(sums), out_smem)

        _, sums = lax.fori_loop(start, stop, fold, (jnp.int32(0), hopper.no_sums(H)))
        pair, (values_ref, stats_ref) = b * K + head, part_refs
        if stats_ref is not None:
            stats_smem[0], stats_smem[1] = sums.maximum_U, sums.mass_U
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[pair, split])
        if not is_split:
            store(sums, 0)
            if has_totals:
                plgpu.wait_smem_to_gmem(0)
            return
        parts = splits.Parts(values_ref, stats_ref)
        rows = pl.ds((pair * X + split) * num_rows, num_rows)
        for first in range(0, H, _OUT_WIDTH):
            if first:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last ones have left
            part_smem[...] = sums.values_UH[:, first : first + _OUT_WIDTH]
            plgpu.commit_smem()
            columns = parts.values.at[rows, pl.ds(first, _OUT_WIDTH)]
            plgpu.copy_smem_to_gmem(part_smem.at[pl.ds(0, num_rows)], columns)
        plgpu.wait_smem_to_gmem(0)

        def combine(i):
            columns = i * slice_width, slice_width
            store(splits.combined(parts, pair, num_rows, columns, interpret), columns[0])

        count_ref = splits.count(q_ref, Z, b, head)
        splits.combine(count_ref, split, X, H // slice_width, combine, interpret)

    tiles = hopper.operand_layout(dtype)
    pages_held = plgpu.SMEM((num_stages, page_tokens, H), dtype, transforms=tiles)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((ROWS, H), dtype, transforms=tiles),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), ROWS), jnp.int32),
        keys_smem=pages_held,
        values_smem=pages_held,
        out_smem=plgpu.SMEM(
            (ROWS, min(2 * _OUT_WIDTH // out_dtype.itemsize, slice_width)), out_dtype
        ),
        q_arrived=plgpu.Barrier(),
        bounds_arrived=plgpu.Barrier(),
        keys_arrived=plgpu.Barrier(num_barriers=num_stages),
        values_arrived=plgpu.Barrier(num_barriers=num_stages),
    )
    if is_split:
        scratch["part_smem"] = plgpu.SMEM((ROWS, _OUT_WIDTH), jnp.float32)
    if is_split or has_totals:
        scratch["stats_smem"] = plgpu.SMEM((2, ROWS), jnp.float32)
    parts = splits.part_types(Z * K, X, num_rows, H, has_totals)
    mesh = plgpu.Mesh(
        grid=(Z, K, X),  # the last is the one whose neighbors run at the same time
        grid_names=("row", "head", "split"),
        kernel_name="paged_attention",
    )
    out_types = jax.ShapeDtypeStruct(shape, out_dtype), parts
    out_YWNH, (_, stats) = hopper.launch(kernel, out_types, mesh, scratch, score_cap, interpret)(
        q, pages, ranges, jnp.stack(bounds_ZU, axis=1), sinks_N
    )
    return out_YWNH, stats
