"""Splits of a row's pages on Hopper GPUs, whose parts become one result in the kernel that made
them (Flash-Decoding, Dao et al. 2023, combines them in another launch).

A block writes its part to device memory, counts itself and waits for the other splits. Then each
combines some columns of all parts, always in the order of the pages: a result's bits depend neither
on which block is the last nor on its columns. So

* the parts are read by several multiprocessors, one for 16 columns at least. The last block alone
  would read them all: 66 parts of a row of DeepSeek's latents are 8 MiB;
* blocks wait for neighbors in the grid only, which run or have run by then: a device begins blocks
  in order, and `most_splits` fit it at once. A cluster would promise that, but has 8 blocks at most
  (16 where it is allowed), and its multiprocessors share one GPC;
* a count begins at 0 in every launch and is never reset. It lies behind the queries, in zeros that
  XLA writes where it lays them out as tiles, so no other launch clears it.

Z counts rows of the kernel's grid, X splits, U the query rows of a tile.
"""

from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers.kernels.attention import hopper
from layers.kernels.attention.hopper import ROWS, Tokens
from layers.kernels.attention.tiles import Tiling
from layers.kernels.device import Device
from layers.kernels.registers import load

_MIN_COLUMNS = 16  # that a block combines: a sector of device memory of the result
_AHEAD = 8  # parts that a block reads at a time
_COUNTS_WIDTH = 4  # elements of queries: 32 bits of each of at most two warpgroups


class Parts(NamedTuple):
    """What splits leave for each other, references in device memory: weighted values, [parts x
    rows, H] and some rows behind them, and maximum (base 2) and mass of weights, [rows of the grid,
    X, 2, 64]. Rows that no query has are arbitrary.
    """

    values: jax.Ref
    stats: jax.Ref


class PageRanges(NamedTuple):
    """Which pages splits read, arrays or a kernel's references: the first of a row, up to a number
    of them, and then those behind some that it skips.
    """

    table_ZP: jax.Array  # or of each KV head, [Z, K, P]
    start_ZX: jax.Array  # the first page that is read, counted without those that are skipped
    stop_ZX: jax.Array  # behind the last
    skipped_Z: jax.Array | None = None

    def page(self, row: jax.Array, head: jax.Array, column: jax.Array) -> jax.Array:
        """The page in a column of a row's table, of a KV head."""
        return self.table_ZP[(row, head, column) if self.table_ZP.ndim == 3 else (row, column)]

    def column(self, row: jax.Array, j: jax.Array, head_pages: int) -> jax.Array:
        """Where in its page table a row has the j-th page that it reads."""
        if self.skipped_Z is None:
            return j
        return j + jnp.where(j < head_pages, 0, self.skipped_Z[row])


def most_splits(tiles: int, device: Device) -> int:
    """Splits whose blocks, of so many tiles that are neighbors in the grid, fit the device."""
    return max(1, device.num_cores // tiles)


def part_types(
    num_pairs: int, num_splits: int, rows: int, width: int, has_totals: bool
) -> tuple[jax.ShapeDtypeStruct | None, jax.ShapeDtypeStruct | None]:
    """Shapes of `Parts` of pairs of row and head. A single split leaves no values, and statistics
    where totals are made of them.
    """
    num_rows = num_pairs * num_splits * rows + ROWS - rows  # the last part is read as 64 rows, too
    values = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    stats = jax.ShapeDtypeStruct((num_pairs, num_splits, 2, ROWS), jnp.float32)
    return values if num_splits > 1 else None, stats if num_splits > 1 or has_totals else None


def totals(stats: jax.Array, shape: tuple[int, ...], tiling: Tiling) -> jax.Array:
    """Log-sum-exps [Y, W, N] of statistics [Z K, X, 2, 64], of results [Y, W, N, H]."""
    maximum_ZXU, mass_ZXU = stats[:, :, 0], stats[:, :, 1]
    maximum_ZU = maximum_ZXU.max(1)
    mass_ZU = (mass_ZXU * jnp.exp2(maximum_ZXU - maximum_ZU[:, None])).sum(1)
    total_ZU = hopper.log_sum_exp(maximum_ZU, mass_ZU)
    total_ZKU1 = total_ZU.reshape(-1, shape[2] // tiling.group, ROWS, 1)
    return tiling.unpack(total_ZKU1, (*shape[:3], 1))[..., 0]


def with_counts(q_ZKUH: jax.Array) -> jax.Ref:
    """The queries, and rows of the grid whose zeros become counts."""
    Z, _, U, H = q_ZKUH.shape
    q = jnp.pad(q_ZKUH, ((0, -(-Z * _COUNTS_WIDTH // (U * H))), (0, 0), (0, 0), (0, 0)))
    return jax.new_ref(q, memory_space=plgpu.GMEM)


def count(
    q_ref: jax.Ref, num_rows: int, row: jax.Array, head: jax.Array, reader: int = 0
) -> jax.Ref:
    """The 32 bits that count a row's splits of a head, behind the queries of all rows."""
    _, _, U, H = q_ref.shape
    at = _COUNTS_WIDTH * row + 2 * reader
    place = num_rows + lax.div(at, U * H), head, lax.rem(lax.div(at, H), U)
    return q_ref.at[*place, pl.ds(lax.rem(at, H), 2)]


def slice_width(width: int, num_splits: int, tiling: Tiling) -> int:
    """Columns that a block combines, a divisor of all: few enough that all blocks have some, if a
    token's rows of the tile are whole lines of shared memory, where copies begin.
    """
    step = _MIN_COLUMNS if tiling.width == 1 else max(_MIN_COLUMNS, 64 // gcd(64, tiling.group))
    widths = [n for n in range(step, width + 1, step) if width % n == 0]
    return next((n for n in widths if n * num_splits >= width), width)


def tokens(tiling: Tiling, shape: tuple[int, ...], row: jax.Array, head: jax.Array) -> Tokens:
    """The tokens of a row of the grid and a KV head in the result, [Y, W, N, H]."""
    tiles = -(-shape[1] // tiling.width)
    first = lax.rem(row, jnp.int32(tiles)) * tiling.width
    num_tokens = tiling.width if tiles == 1 else jnp.minimum(tiling.width, shape[1] - first)
    y = lax.div(row, jnp.int32(tiles))
    return Tokens(y, first, num_tokens, head * tiling.group, tiling.group)


def with_sinks(
    sums: hopper.Sums, sinks_ref: jax.Ref, tiling: Tiling, head: jax.Array
) -> hopper.Sums:
    """The sums of a tile of a KV head with its sinks, where there are any."""
    head_U = lax.rem(lax.broadcasted_iota(jnp.int32, (ROWS,), 0), jnp.int32(tiling.group))
    return hopper.with_sinks(sums, sinks_ref, head * tiling.group, tiling.group, head_U)


def combine(
    count_ref: jax.Ref, split: jax.Array, num_splits: int, num_slices: int,
    combine_slice: Callable[[jax.Array], None], interpret: object,
) -> None:  # fmt: skip
    """Has slices of the columns combined, each by one block, once all splits have written."""
    if interpret:  # runs one block after another: the last combines
        count = count_ref[0] + 1
        count_ref[0] = count
        pl.when(count == num_splits)(lambda: pl.loop(0, num_slices)(combine_slice))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive_and_wait(_, count_ref):
        count = mgpu.SemaphoreRef(mgpu.utils.memref_ptr(count_ref))
        mgpu.warpgroup_barrier()
        count.signal(1, memory_scope="gpu")
        count.wait(num_splits, decrement=False, memory_scope="gpu")

    arrive_and_wait(count_ref)
    pl.when(split < num_slices)(lambda: combine_slice(split))


def combined(
    parts: Parts, pair: jax.Array, rows: int, columns: tuple[jax.Array, int], interpret: object
) -> hopper.Sums:
    """The softmax over all splits of a pair, of some columns: the first, and how many."""
    (first, width), num_splits = columns, parts.stats.shape[1]
    ahead = -(-num_splits // -(-num_splits // _AHEAD))

    def read(split):
        row = (pair * num_splits + split) * rows
        maximum_U, mass_U = (
            load(parts.stats.at[pair, split, i], plgpu.Layout.WGMMA.reduce(1), interpret)
            for i in range(2)
        )
        values = parts.values.at[pl.ds(row, ROWS), pl.ds(first, width)]
        values_UH = load(values, plgpu.Layout.WGMMA, interpret)
        return hopper.Sums(maximum_U, mass_U, values_UH)

    def fold(i, sums):
        splits = [i * ahead + n for n in range(ahead)]
        arrived = [read(jnp.minimum(split, num_splits - 1)) for split in splits]
        for split, part in zip(splits, arrived, strict=True):
            if num_splits % ahead:  # the last one, again, has no weight
                offset = jnp.where(split < num_splits, 0.0, hopper.MASKED)
                part = part._replace(maximum_U=part.maximum_U + offset)
            sums = hopper.joined(sums, part)
        return sums

    return lax.fori_loop(0, -(-num_splits // ahead), fold, hopper.no_sums(width))
