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
  1805.02867); they are combined after (Flash-Decoding, Dao et al. 2023).

The step's keys and values are already in the pages (`page_rows.write`, in place). XLA writes them
from the launch that rotates them, so an append in here would save no launch (`docs/kernels.md`).

Latents have a kernel of their own (`gpu_latent.py`), which takes the place of this one's blocks.
So have prompts (`gpu_prefill.py`), where time is the tensor core's.

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
from layers.kernels.attention import contract, gpu_index, gpu_latent, gpu_prefill, hopper
from layers.kernels.attention.contract import PLAIN, Demand, Options
from layers.kernels.attention.hopper import LOG2_E, ROWS, SHARED_BYTES
from layers.kernels.attention.mask import MaskBounds, mask_bounds
from layers.kernels.attention.tiles import Tiling, visible_pages
from layers.kernels.device import Device, target_device
from layers.ragged import Rectangle

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
    if demand.has_first_tokens:
        return contract.FIRST_TOKENS
    if page_format.is_quantized:
        return f"reads no {dtype} caches: leave model.cache_format out"
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


def own_sizes(num_blocks: int, max_stages: int, device: Device) -> dict[str, int]:
    """Sizes for untuned shapes, by the pairs of row and KV head, and the stages that fit."""
    return {"num_splits": max(1, device.num_cores // num_blocks), "num_stages": min(4, max_stages)}


def most_stages(page_tokens: int, head_width: int, itemsize: int) -> int:
    """Pages that a block's shared memory has room for beside its queries and its output."""
    fixed_bytes = ROWS * (head_width * itemsize + _OUT_WIDTH * 4)
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
    beside: jax.Array | None = None,
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
        beside: pages of single latents, whose row r a table of single latents names by ~r.
        interpret: `InterpretGPUParams`: interpreted, on any device.
    """
    (Y, W, N, H), is_latent, device = q_YWNH.shape, page_format.values_in_keys, target_device()
    page_tokens = ROWS if is_latent else pages.shape[1]  # latents of any pages are read in tiles
    if num_splits is None and num_stages is None and not is_latent:
        K = page_format.kv_heads
        if gpu_prefill.suits(q_YWNH.shape, K, options, device):
            out_YWNH = gpu_prefill.attend_pages(
                q_YWNH, pages, rectangle, group, K, options, interpret
            )
            return out_YWNH.astype(jnp.float32)
    K = gpu_latent.head_tiles(N) if is_latent else page_format.kv_heads
    G = N // K
    width = min(W, ROWS // G)  # query tokens of a tile
    tiling = Tiling(width, G, -(-width * G // _MOVED_ROWS) * _MOVED_ROWS)
    valid_ZW = tiling.split(rectangle.valid_YW)
    bounds, Z = mask_bounds(rectangle, options.window, options.chunked), len(valid_ZW)
    bounds = jax.tree.map(tiling.split, bounds)
    shape_class = tuning.attention_class(Z, K, H, page_tokens)
    if is_latent:
        max_stages = gpu_latent.most_stages(H)
    else:
        max_stages = most_stages(page_tokens, H, pages.dtype.itemsize)
    sizes = own_sizes(Z * K, max_stages, device)
    sizes |= tuning.sizes("pallas_gpu", device, shape_class)
    num_splits = num_splits or sizes["num_splits"]
    is_whole = num_splits == 1 and options.sinks_N is None
    out_rows = width * G if is_whole else tiling.num_rows
    if is_latent:
        attend = functools.partial(
            gpu_latent.attend_splits, value_width=page_format.value_width,
            beside=None if beside is None else page_rows.decode(beside),
        )  # fmt: skip
    else:
        attend = functools.partial(_attend_splits, out_rows=out_rows)
    values_ZKXUH, stats_ZKX2U = attend(
        tiling.pack(q_YWNH), page_rows.decode(pages),
        jnp.repeat(rectangle.tables[group], Z // Y, axis=0),
        jax.tree.map(lambda x_ZW: tiling.spread(x_ZW, ROWS), bounds),
        *_split_pages(bounds, valid_ZW, page_tokens, num_splits), is_whole=is_whole,
        num_stages=num_stages or sizes["num_stages"],
        score_cap=options.score_cap, interpret=interpret,
    )  # fmt: skip
    shape = Y, W, N, page_format.value_width
    if stats_ZKX2U is None:
        return tiling.unpack(values_ZKXUH[:, :, 0], shape).astype(jnp.float32)
    sinks_KU = None if options.sinks_N is None else tiling.sinks(options.sinks_N)
    values_ZKXUH, stats_ZKX2U = (
        values_ZKXUH[..., : tiling.num_rows, :], stats_ZKX2U[..., : tiling.num_rows],
    )  # fmt: skip
    return tiling.unpack(_combine(values_ZKXUH, stats_ZKX2U, sinks_KU), shape)


def _split_pages(
    bounds: MaskBounds, valid_ZW: jax.Array, page_tokens: int, num_splits: int
) -> tuple[jax.Array, jax.Array]:
    """First table column that each split of a row reads, and the one after its last, i32[Z, X]
    each. Splits share the keys that valid tokens see equally; late splits of a short row are empty.
    """
    first_Z, stop_Z = visible_pages(bounds, valid_ZW, page_tokens)
    first_Z1, stop_Z1 = first_Z[:, None], stop_Z[:, None]
    share_Z1 = -(-(stop_Z1 - first_Z1) // num_splits)
    start_ZX = first_Z1 + share_Z1 * jnp.arange(num_splits, dtype=jnp.int32)
    return jnp.minimum(start_ZX, stop_Z1), jnp.minimum(start_ZX + share_Z1, stop_Z1)


def _combine(
    values_ZKXUH: jax.Array, stats_ZKX2U: jax.Array, sinks_KU: jax.Array | None
) -> jax.Array:
    """The softmax over a row's splits and its sink: float32 [Z, K, U, H]; 0 if nothing was read."""
    maximum_ZKXU, mass_ZKXU = stats_ZKX2U[:, :, :, 0], stats_ZKX2U[:, :, :, 1]
    maximum_ZKU = maximum_ZKXU.max(2)
    if sinks_KU is not None:
        maximum_ZKU = jnp.maximum(maximum_ZKU, sinks_KU * LOG2_E)
    decay_ZKXU = jnp.exp2(maximum_ZKXU - maximum_ZKU[:, :, None])
    mass_ZKU = (mass_ZKXU * decay_ZKXU).sum(2)
    if sinks_KU is not None:
        mass_ZKU += jnp.exp2(sinks_KU * LOG2_E - maximum_ZKU)
    out_ZKUH = (values_ZKXUH * decay_ZKXU[..., None]).sum(2) / mass_ZKU[..., None]
    return jnp.where(mass_ZKU[..., None] == 0, 0, out_ZKUH)


# --- the kernel -----------------------------------------------------------------------------------


def _attend_splits(
    q_ZKUH: jax.Array,
    pages: jax.Array,
    table_ZP: jax.Array,
    bounds: MaskBounds,  # i32[Z, 64] each
    start_ZX: jax.Array,
    stop_ZX: jax.Array,
    *,
    out_rows: int,
    is_whole: bool,
    num_stages: int,
    score_cap: float | None,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of each split alone: weighted values, float32 [Z, K, X, out_rows, H], and maximum
    (base 2) and mass of their weights, float32 [Z, K, X, 2, 64]. Where a split `is_whole`, nothing
    is left to combine: their quotient, in the pages' dtype, and None.
    """
    (Z, K, num_rows, H), page_tokens, X = q_ZKUH.shape, pages.shape[1], start_ZX.shape[1]
    dtype, bounds_ZU = pages.dtype, jax.tree.leaves(bounds)
    out_dtype = dtype if is_whole else jnp.float32

    def kernel(
        q_ref, pages_ref, table_ref, bounds_ref, start_ref, stop_ref, values_ref, *stats_refs,
        q_smem, bounds_smem, keys_smem, values_smem, out_smem, stats_smem,
        q_arrived, bounds_arrived, keys_arrived, values_arrived,
    ):  # fmt: skip
        b, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        start, stop = start_ref[b, split], stop_ref[b, split]
        row_table_ref = table_ref.at[b, head] if table_ZP.ndim == 3 else table_ref.at[b]

        def fetch(page, j):
            stage = lax.rem(j - start, jnp.int32(num_stages))
            for part, target, arrived in (
                (head, keys_smem, keys_arrived),
                (K + head, values_smem, values_arrived),
            ):
                box = pages_ref.at[page, :, pl.ds(part * H, H)]
                plgpu.copy_gmem_to_smem(box, target.at[stage], arrived.at[stage])

        plgpu.copy_gmem_to_smem(q_ref.at[b, head], q_smem.at[pl.ds(0, num_rows)], q_arrived)
        plgpu.copy_gmem_to_smem(bounds_ref.at[b], bounds_smem, bounds_arrived)
        pl.loop(start, jnp.minimum(stop, start + num_stages))(lambda j: fetch(row_table_ref[j], j))
        plgpu.barrier_wait(q_arrived)
        plgpu.barrier_wait(bounds_arrived)
        fields_U = [bounds_smem[i] for i in range(len(bounds_ZU))]
        bounds_U = jax.tree.unflatten(jax.tree.structure(bounds), fields_U)

        def fold(j, sums):
            stage = lax.rem(j - start, jnp.int32(num_stages))
            ahead = j + num_stages
            page = row_table_ref[jnp.minimum(ahead, stop - 1)]  # asked for long before it is used
            plgpu.barrier_wait(keys_arrived.at[stage])
            scores_US = hopper.scores(q_smem, keys_smem.at[stage], interpret)
            sums, weights_US = hopper.weigh(sums, scores_US, j * page_tokens, bounds_U, score_cap)
            plgpu.barrier_wait(values_arrived.at[stage])
            sums = hopper.add_values(sums, weights_US, values_smem.at[stage], interpret)
            pl.when(ahead < stop)(lambda: fetch(page, ahead))
            return sums

        sums = lax.fori_loop(start, stop, fold, hopper.no_sums(H))
        values_UH = hopper.quotient(sums) if is_whole else sums.values_UH
        for stats_ref in stats_refs:
            stats_smem[0], stats_smem[1] = sums.maximum_U, sums.mass_U
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[b, head, split])
        for first in range(0, H, _OUT_WIDTH):
            if first:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last ones have left `out`
            out_smem[...] = values_UH[:, first : first + _OUT_WIDTH].astype(out_dtype)
            plgpu.commit_smem()
            columns = values_ref.at[b, head, split, :, pl.ds(first, _OUT_WIDTH)]
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_rows)], columns)
        plgpu.wait_smem_to_gmem(0)

    tiles = hopper.operand_layout(dtype)
    pages_held = plgpu.SMEM((num_stages, page_tokens, H), dtype, transforms=tiles)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((ROWS, H), dtype, transforms=tiles),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), ROWS), jnp.int32),
        keys_smem=pages_held,
        values_smem=pages_held,
        out_smem=plgpu.SMEM((ROWS, _OUT_WIDTH), out_dtype),
        stats_smem=plgpu.SMEM((2, ROWS), jnp.float32),
        q_arrived=plgpu.Barrier(),
        bounds_arrived=plgpu.Barrier(),
        keys_arrived=plgpu.Barrier(num_barriers=num_stages),
        values_arrived=plgpu.Barrier(num_barriers=num_stages),
    )
    values = jax.ShapeDtypeStruct((Z, K, X, out_rows, H), out_dtype)
    stats = jax.ShapeDtypeStruct((Z, K, X, 2, ROWS), jnp.float32)
    values_ZKXUH, *stats_ZKX2U = plgpu.kernel(
        kernel,
        out_type=(values,) if is_whole else (values, stats),
        scratch_types=scratch,
        grid=(Z, K, X),
        grid_names=("row", "head", "split"),
        kernel_name="paged_attention",
        compiler_params=hopper.compiler_params(score_cap),
        interpret=interpret,
    )(q_ZKUH, pages, table_ZP, jnp.stack(bounds_ZU, axis=1), start_ZX, stop_ZX)
    return values_ZKXUH, stats_ZKX2U[0] if stats_ZKX2U else None
