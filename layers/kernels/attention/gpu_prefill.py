"""Attention of prompts over pages on Hopper GPUs (Pallas, Mosaic GPU): of rows with more query
tokens than a tile of `gpu.py` holds, whose time is the tensor core's.

A block of threads belongs to a KV head and a tile of up to 128 query rows. So

* two warpgroups have 64 rows each and read the same keys and values: a page is fetched half as
  often, by a third warpgroup and as soon as both are done with an earlier one;
* a warpgroup has the products of the next keys and of the last weights computed at once, and
  softens the scores of the former beside the latter (Shah et al. 2024, arXiv 2407.08608);
* a step takes 128 keys where registers allow it, so that sums are rescaled half as often; only
  steps with a key that some token does not see are masked;
* tiles with the most keys begin first, since the device waits for what ends last.

In a tile the tokens of one query head lie behind those of another. Each head's are one box of the
copy engine, which takes queries and brings results as XLA has them: nothing is packed before.

Z counts tiles, U their rows, S the keys of a step.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers import page_rows
from layers.kernels.attention import hopper
from layers.kernels.attention.contract import Options, Stretch
from layers.kernels.attention.hopper import LOG2_E, ROWS
from layers.kernels.attention.mask import MaskBounds
from layers.kernels.attention.tiles import Tiling, visible_pages
from layers.kernels.device import Device
from layers.linear import soft_cap

_READERS = 2  # warpgroups that share keys and values
_TILE_ROWS = _READERS * ROWS
_BOX_ROWS = 8  # of a tile in shared memory: what is copied comes in multiples
_STAGES = 2  # steps that are on their way or in use; a third was slower on an H200
_MOST_WIDTH = 128  # of heads of which a step takes 128 keys; 64 of wider ones
# Registers a thread: 168 at first; the warpgroup that fetches needs few.
_READER_REGISTERS, _FETCHER_REGISTERS = 232, 40


def suits(shape: tuple[int, ...], num_kv_heads: int, device: Device) -> bool:
    """Whether queries [Y, W, N, H] are this kernel's: with as many blocks as fill a third of a
    device it takes no longer than `gpu.py`, which divides the keys of a tile among blocks.
    """
    Y, W, N, _ = shape
    G = N // num_kv_heads
    if W * G <= ROWS or not _tile_tokens(G):
        return False
    return 3 * Y * -(-W // _tile_tokens(G)) * num_kv_heads >= device.num_cores


def _tile_tokens(group: int) -> int:
    """Query tokens of a tile, with as many query heads a KV head; 0 if they are too many."""
    return _TILE_ROWS // group // _BOX_ROWS * _BOX_ROWS


def attend(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    num_kv_heads: int,
    options: Options,
    interpret: object,
    has_totals: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention in the pages' dtype of queries that it `suits`, and on demand log-sum-exps."""
    pages, table_YP, bounds = stretch
    (Y, W, N, H), page_tokens = q_YWNH.shape, pages.shape[1]
    G = N // num_kv_heads
    tiling = Tiling(_tile_tokens(G), G, _TILE_ROWS)
    step_tokens = max(page_tokens, 128 if H <= _MOST_WIDTH else 64)
    bounds, valid_ZW = jax.tree.map(tiling.split, bounds), tiling.split(valid_YW)
    first_Z, stop_Z = visible_pages(bounds, valid_ZW, page_tokens)
    ranges = first_Z, stop_Z, *_clear(bounds, valid_ZW, step_tokens)
    padding = (0, 0), (0, _TILE_ROWS - tiling.width * G)
    out_XH, stats = _attend_tiles(
        tiling.split(q_YWNH).reshape(-1, N * H), page_rows.decode(pages), table_YP,
        jax.tree.map(lambda x_ZW: jnp.pad(jnp.tile(x_ZW, (1, G)), padding), bounds),
        jnp.stack(ranges, axis=1), options.sinks_N,
        head_pages=-(-options.first_tokens // page_tokens), tiling=tiling, head_width=H,
        step_pages=step_tokens // page_tokens,
        score_cap=options.score_cap, has_totals=has_totals, interpret=interpret,
    )  # fmt: skip
    out_YWNH = out_XH.reshape(Y, -1, N, H)[:, :W]
    if stats is None:
        return out_YWNH, None
    total_ZKU = hopper.log_sum_exp(stats[:, :, 0], stats[:, :, 1])[..., : tiling.width * G]
    is_read_Z = (first_Z < stop_Z) | ((stop_Z > 0) & (options.first_tokens > 0))  # others left none
    total_ZKU = jnp.where(is_read_Z[:, None, None], total_ZKU, hopper.MASKED)
    total_ZNW = total_ZKU.reshape(-1, N, tiling.width)
    return out_YWNH, total_ZNW.swapaxes(1, 2).reshape(Y, -1, N)[:, :W]


def _clear(
    bounds: MaskBounds, valid_ZW: jax.Array, step_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """First step whose keys all valid tokens see, and the one after the last: i32[Z] each."""
    stop_ZW = bounds.last_YW + 1
    if bounds.tree_start_YW is not None:
        stop_ZW = jnp.minimum(stop_ZW, bounds.tree_start_YW)
    stop_Z = jnp.where(valid_ZW, stop_ZW, jnp.iinfo(jnp.int32).max).min(1) // step_tokens
    if bounds.first_YW is None:
        return jnp.zeros_like(stop_Z), stop_Z
    return -(-jnp.where(valid_ZW, bounds.first_YW, 0).max(1) // step_tokens), stop_Z


# --- the kernel -----------------------------------------------------------------------------------


def _attend_tiles(
    q: jax.Array,  # [Z width, N H]
    pages: jax.Array,
    table_YP: jax.Array,
    bounds: MaskBounds,  # i32[Z, U] each
    ranges_Z4: jax.Array,  # pages of the window or chain, steps whose keys are all seen: from, to
    sinks_N: jax.Array | None,
    *,
    head_pages: int,  # of first tokens, which are read, too
    tiling: Tiling,
    head_width: int,
    step_pages: int,
    score_cap: float | None,
    has_totals: bool,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """[Z width, N H], and on demand of each row maximum (base 2) and mass of its weights, arbitrary
    where a tile reads nothing: [Z, K, 2, 128].
    """
    Z, page_tokens, (width, G, _), H = len(ranges_Z4), pages.shape[1], tiling, head_width
    K, tiles = q.shape[1] // (G * H), Z // len(table_YP)
    dtype, bounds_ZU, step_tokens = pages.dtype, jax.tree.leaves(bounds), step_pages * page_tokens
    head_steps = -(-head_pages // step_pages)

    def kernel(
        q_ref, pages_ref, table_ref, bounds_ref, ranges_ref, sinks_ref, out_ref, stats_ref, *,
        q_smem, bounds_smem, keys_smem, values_smem, q_arrived, bounds_arrived, keys_arrived,
        values_arrived, keys_read, values_read, attended,
    ):  # fmt: skip
        hopper.begin(interpret)
        z, head = Z - 1 - lax.axis_index("tile"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        first_page, stop_page, clear, unclear = (ranges_ref[z, i] for i in range(4))
        start = lax.div(first_page, jnp.int32(step_pages))
        stop = lax.div(stop_page + (step_pages - 1), jnp.int32(step_pages))
        if head_steps:  # are counted first, then those of the window
            skipped = jnp.maximum(jnp.minimum(start, stop) - head_steps, 0)
            start, stop = jnp.int32(0), stop - skipped

        def in_row(step):
            return step + jnp.where(step < head_steps, 0, skipped) if head_steps else step

        def at(step):
            return lax.rem(step - start, jnp.int32(_STAGES))

        def boxes():
            for g in range(G):
                columns = pl.ds((head * G + g) * H, H)
                yield (pl.ds(z * width, width), columns), pl.ds(g * width, width)

        def read():
            plgpu.set_max_registers(_READER_REGISTERS, action="increase")
            plgpu.barrier_wait(q_arrived)
            plgpu.barrier_wait(bounds_arrived)
            rows = pl.ds(warpgroup * ROWS, ROWS)

            def release(read_barrier, j):
                is_awaited = j + _STAGES < stop
                pl.when(is_awaited)(lambda: plgpu.barrier_arrive(read_barrier.at[at(j)]))

            def masked(scores_US, j):
                fields_U = [bounds_smem[i, rows] for i in range(len(bounds_ZU))]
                bounds_U = jax.tree.unflatten(jax.tree.structure(bounds), fields_U)
                visible_US = hopper.visible_keys(scores_US.shape, in_row(j) * step_tokens, bounds_U)
                return jnp.where(visible_US, scores_US, hopper.MASKED)

            def soften(j, maximum_U, mass_U, scores_US):
                """Largest score and mass so far, what earlier sums decay by, and weights."""
                scores_US = soft_cap(scores_US, score_cap)
                is_clear = (clear <= in_row(j)) & (in_row(j) < unclear)
                scores_US = lax.cond(is_clear, lambda x, j: x, masked, scores_US, j)
                release(keys_read, j)
                new_maximum_U = jnp.maximum(maximum_U, scores_US.max(1) * LOG2_E)
                decay_U = jnp.exp2(maximum_U - new_maximum_U)
                new_maximum_US = lax.broadcast_in_dim(new_maximum_U, scores_US.shape, (0,))
                # One operation in addition to `exp2`.
                weights_US = jnp.exp2(scores_US * LOG2_E - new_maximum_US)
                new_sums = new_maximum_U, mass_U * decay_U + weights_US.sum(1), decay_U, weights_US
                # All of it before the next keys are waited for, behind which the compiler would
                # move it otherwise, and then behind the end of the product that runs beside it.
                new_sums = lax.optimization_barrier(new_sums)
                pl.when(j + 1 < stop)(lambda: plgpu.barrier_wait(keys_arrived.at[at(j + 1)]))
                return new_sums

            def fold(j, sums):
                maximum_U, mass_U, values_UH, weights_US = sums
                plgpu.barrier_wait(values_arrived.at[at(j - 1)])
                softened, values_UH = hopper.scores_and_values(
                    q_smem.at[rows], keys_smem.at[at(j)],
                    lambda scores_US: soften(j, maximum_U, mass_U, scores_US),
                    values_UH, weights_US, values_smem.at[at(j - 1)], interpret,
                )  # fmt: skip
                release(values_read, j - 1)
                maximum_U, mass_U, decay_U, weights_US = softened
                values_UH *= lax.broadcast_in_dim(decay_U, values_UH.shape, (0,))
                return maximum_U, mass_U, values_UH, weights_US.astype(dtype)

            @pl.when(start < stop)
            def _():
                plgpu.barrier_wait(keys_arrived.at[0])
                scores_US = hopper.scores(q_smem.at[rows], keys_smem.at[0], interpret)
                none = hopper.no_sums(H)
                maximum_U, mass_U, _, weights_US = soften(
                    start, none.maximum_U, none.mass_U, scores_US
                )
                sums = maximum_U, mass_U, none.values_UH, weights_US.astype(dtype)
                *statistics, weights_US = lax.fori_loop(start + 1, stop, fold, sums)
                plgpu.barrier_wait(values_arrived.at[at(stop - 1)])
                whole = hopper.add_values(
                    hopper.Sums(*statistics), weights_US, values_smem.at[at(stop - 1)], interpret
                )
                if sinks_ref is not None:
                    row_U = lax.broadcasted_iota(jnp.int32, (ROWS,), 0) + warpgroup * ROWS
                    head_U = lax.div(row_U, jnp.int32(width))
                    whole = hopper.with_sinks(whole, sinks_ref, head * G, G, head_U)
                q_smem[rows] = hopper.quotient(whole).astype(dtype)
                if stats_ref is not None:
                    stats_ref[z, head, 0, rows] = whole.maximum_U
                    stats_ref[z, head, 1, rows] = whole.mass_U

            plgpu.commit_smem()
            plgpu.barrier_arrive(attended)

        def fetch():
            plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
            for in_memory, in_tile in boxes():
                plgpu.copy_gmem_to_smem(q_ref.at[in_memory], q_smem.at[in_tile], q_arrived)
            plgpu.copy_gmem_to_smem(bounds_ref.at[z], bounds_smem, bounds_arrived)

            @pl.loop(start, stop)
            def _(j):
                # Beside a page that is seen may be one that is not, nor be read: some other, then.
                columns = [in_row(j) * step_pages + i for i in range(step_pages)]
                for i, column in enumerate(columns):
                    is_skipped = (column >= head_pages) & (column < first_page)
                    is_unseen = is_skipped | (column >= stop_page)
                    columns[i] = jnp.where(is_unseen, stop_page - 1, column)
                step = [table_ref[lax.div(z, jnp.int32(tiles)), column] for column in columns]
                for part, target, arrived, read_barrier in (
                    (head, keys_smem, keys_arrived, keys_read),
                    (K + head, values_smem, values_arrived, values_read),
                ):

                    @pl.when(j - start >= _STAGES)
                    def _(read_barrier=read_barrier):
                        plgpu.barrier_wait(read_barrier.at[at(j)])

                    for i, page in enumerate(step):
                        box = pages_ref.at[page, :, pl.ds(part * H, H)]
                        place = target.at[at(j), pl.ds(i * page_tokens, page_tokens)]
                        plgpu.copy_gmem_to_smem(box, place, arrived.at[at(j)])

            plgpu.barrier_wait(attended)
            for in_memory, in_tile in boxes():
                plgpu.copy_smem_to_gmem(q_smem.at[in_tile], out_ref.at[in_memory])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(warpgroup < _READERS)(read)
        pl.when(warpgroup == _READERS)(fetch)

    operands = hopper.operand_layout(dtype)
    stages = plgpu.SMEM((_STAGES, step_tokens, H), dtype, transforms=operands)
    arrived = plgpu.Barrier(num_arrivals=step_pages, num_barriers=_STAGES)
    was_read = plgpu.Barrier(num_arrivals=_READERS, num_barriers=_STAGES)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((_TILE_ROWS, H), dtype, transforms=operands),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), _TILE_ROWS), jnp.int32),
        keys_smem=stages,
        values_smem=stages,
        q_arrived=plgpu.Barrier(num_arrivals=G),
        bounds_arrived=plgpu.Barrier(),
        keys_arrived=arrived,
        values_arrived=arrived,
        keys_read=was_read,
        values_read=was_read,
        attended=plgpu.Barrier(num_arrivals=_READERS),
    )
    mesh = plgpu.Mesh(
        grid=(Z, K),  # neighbors run at the same time: the heads of a tile
        grid_names=("tile", "head"),
        num_threads=_READERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_of_prompts",
    )
    stats = jax.ShapeDtypeStruct((Z, K, 2, _TILE_ROWS), jnp.float32) if has_totals else None
    out_types = jax.ShapeDtypeStruct(q.shape, dtype), stats
    out_XH, stats = hopper.launch(kernel, out_types, mesh, scratch, score_cap, interpret)(
        q, pages, table_YP, jnp.stack(bounds_ZU, axis=1), ranges_Z4, sinks_N
    )
    return out_XH, stats
