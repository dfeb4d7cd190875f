"""What a block of threads computes of a product of few rows on Hopper (`skinny_gpu.py`).

One warpgroup goes through tiles [64 features, W rows], one or two at a time, and through steps
along D. A step is 128 bytes of each feature's row or more. It comes by the copy engine (TMA) with
the columns of the activations it meets; further ones, of the next tiles too, are on their way while
it is used. A tile's numbers are the tensor core's (wgmma) first operand, from registers
(`skinny_operands.py`); one tile's product runs while the next one's numbers are made.

Where groups of a row have scales, the integers are multiplied, which is exact in bfloat16, and a
group's sums are weighed.

Programmatic dependent launch: what a launch before may have written is read, and anything is
written, behind `griddepcontrol.wait`. Weights that nothing writes are fetched before it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref

from layers.kernels.linear import launches, low_bit
from layers.kernels.linear.skinny_operands import PART, ROW_BYTES, Operands
from layers.kernels.registers import load

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # of gates, and what they meet
Cursor = tuple[jax.Array, jax.Array, jax.Array]  # a tile, a block of rows and a step of both
_COLUMNS_TOGETHER = 32  # of products at a time, for which there are registers
_Sums = tuple[jax.Array, ...]  # float32 [64, W] of each tile
_Key = tuple[int, int, int]  # of a box in registers: a tile, a plane, which 128 bytes


class Weights(NamedTuple):
    """A stack of matrices [E, F, D] as the kernel reads it.

    Attributes:
        data: [E, F, elements of a row].
        scale, zero: of groups, [E, G, F or fewer]; None: there are none.
        row: float32 [E, F] that multiplies the sums of a row; None: there is none.
    """

    data: jax.Array
    scale: jax.Array | None
    zero: jax.Array | None
    row: jax.Array | None


class Groups(NamedTuple):
    """Groups of a row that have scales of their own.

    Attributes:
        size: columns of a group.
        of_step: groups of a step.
        scales: of a group, of 64 features.
        num_bytes: of a feature's scale and zero point.
        is_row: there is one group, and a step is a part of it.
    """

    format: str
    size: int
    of_step: int
    scales: int
    num_bytes: int
    is_row: bool = False


class Plan(NamedTuple):
    """How a product is divided.

    Attributes:
        num_blocks: of rows.
        features: of a matrix.
        num_tiles: of a matrix, each of `tiles` x 64 features.
        num_steps: along D.
        columns: of wgmma, the rows in whole tiles of 8.
        tiles: of 64 features, that a block has at a time.
        stages: steps that are on their way or in use.
        shares: blocks of a cluster, which divide the steps.
        clusters: which divide the tiles.
        is_gated: the second tile is of the matrix's second half.
        sums_blocks: a tile's sums go on through all blocks of rows.
    """

    num_blocks: int
    features: int
    num_tiles: int
    num_steps: int
    columns: int
    tiles: int
    stages: int
    shares: int
    clusters: int
    is_gated: bool
    sums_blocks: bool = False

    @property
    def num_results(self) -> int:
        """Blocks of rows of the result."""
        return 1 if self.sums_blocks else self.num_blocks

    @property
    def places(self) -> int:
        """Of a cluster's parts. Its last block reads a tile's while others write the next one's."""
        return 2 if self.num_results * self.num_tiles > self.clusters else 1

    def first_feature(self, tile: jax.Array, half: int) -> jax.Array:
        """The first of the 64 features of a half of a tile."""
        if self.is_gated:
            return tile * PART + half * (self.features // 2)
        return (tile * self.tiles + half) * PART

    def place(self, tile: jax.Array) -> tuple[jax.Array | int, jax.Array]:
        """The block of rows of a tile's result, and which of its matrix's it is."""
        if self.num_results == 1:
            return 0, tile
        num_tiles = jnp.int32(self.num_tiles)
        return lax.div(tile, num_tiles), lax.rem(tile, num_tiles)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block's part of a launch.

    Attributes:
        groups: None: a row has one scale or none, and its sums are not weighed.
        gate: makes what leaves of both tiles' sums; None: sums leave.
        dtype: of what leaves.
        prefetches: no launch of the program writes the weights, nor which matrices are read.
        weighs_sums: factors multiply what enters the gate, not what leaves it.
    """

    plan: Plan
    operands: Operands
    groups: Groups | None
    gate: Gate | None
    dtype: np.dtype[Any]
    prefetches: bool
    interpret: object
    weighs_sums: bool = False

    def run(
        self, refs: dict[str, Any], buffers: dict[str, Any], out_smem: Any, weights_arrived: Any,
        x_arrived: Any,
    ) -> None:  # fmt: skip
        """Multiplies this block's share of its cluster's tiles.

        Args:
            refs: arrays in global memory: x [B, W, D], or [1, W, D] for all blocks, the `Weights`
                there are, `matrices` i32 (how many blocks have one, then each block's), of a gate
                `bias` [E, F] and float32 `factors` [E, W], where there are any, out [B, W, F], and
                parts [places, shares - 1, tiles of a block, 64, W] where there are several shares.
            buffers: stages of shared memory of x, of planes and of groups' scales and zeros.
        """
        plan, cluster, share = self.plan, lax.axis_index("cluster"), lax.axis_index("share")
        start, stop = (n * plan.num_steps // plan.shares for n in (share, share + 1))
        if not self.prefetches:
            launches.await_earlier(self.interpret)
        num_blocks = refs["matrices"][0] if "matrices" in refs else plan.num_blocks
        blocks_of_tile = num_blocks if plan.sums_blocks else 1
        num_tiles = plan.num_tiles * (1 if plan.sums_blocks else num_blocks)
        first, last = (n * num_tiles // plan.clusters for n in (cluster, cluster + 1))
        steps_of_tile = (stop - start) * blocks_of_tile
        count = (last - first) * steps_of_tile

        def next_of(cursor: Cursor) -> Cursor:
            tile, b, k = cursor
            is_last = k + 1 == stop
            k = jnp.where(is_last, start, k + 1)
            if plan.sums_blocks:
                b = jnp.where(is_last, b + 1, b)
                is_last = b == num_blocks
                b = jnp.where(is_last, 0, b)
            return jnp.where(is_last, tile + 1, tile), b, k

        def fetch_weights(cursor: Cursor, stage: jax.Array) -> None:
            self._fetch_weights(refs, buffers, weights_arrived, cursor, stage)

        def fetch_x(cursor: Cursor, stage: jax.Array) -> None:
            self._fetch_x(refs, buffers, x_arrived, cursor, stage)

        def begin(fetch: Callable[[Cursor, jax.Array], None]) -> Cursor:
            def fetch_next(stage: jax.Array, cursor: Cursor) -> Cursor:
                fetch(cursor, stage)
                return next_of(cursor)

            cursor = first, jnp.int32(0), start
            return lax.fori_loop(0, jnp.minimum(count, plan.stages), fetch_next, cursor)

        def fold_tile(tile: jax.Array, cursor: Cursor) -> Cursor:
            operands = self._last_operands(refs, tile)

            def fold(k: jax.Array, carry: tuple[_Sums, Cursor]) -> tuple[_Sums, Cursor]:
                sums, cursor = carry
                n = (tile - first) * steps_of_tile + k
                stage = lax.rem(n, jnp.int32(plan.stages))
                plgpu.barrier_wait(weights_arrived.at[stage])
                plgpu.barrier_wait(x_arrived.at[stage])
                sums = self._with_step(buffers, stage, sums)
                plgpu.commit_smem()  # every warp has read

                @pl.when(n + plan.stages < count)
                def _() -> None:
                    fetch_weights(cursor, stage)
                    fetch_x(cursor, stage)

                return sums, next_of(cursor)

            zeros = (jnp.zeros((PART, plan.columns), jnp.float32),) * plan.tiles
            sums, cursor = lax.fori_loop(0, steps_of_tile, fold, (zeros, cursor))
            self._leave(refs, out_smem, tile, share, sums, operands)
            return cursor

        begin(fetch_weights)
        if self.prefetches:
            launches.await_earlier(self.interpret)
        lax.fori_loop(first, last, fold_tile, begin(fetch_x))
        plgpu.wait_smem_to_gmem(0)

    # --- copies -----------------------------------------------------------------------------------

    def _fetch_weights(
        self, refs: dict[str, Any], buffers: dict[str, Any], arrived: Any, cursor: Cursor,
        stage: jax.Array,
    ) -> None:  # fmt: skip
        (tile, _, k), plan, groups = cursor, self.plan, self.groups
        _, nth = plan.place(tile)
        e = refs["matrices"][1 + self._block_of_rows(cursor)] if "matrices" in refs else 0
        arrived = arrived.at[stage]
        for half in range(plan.tiles):
            first = plan.first_feature(nth, half)
            features = pl.ds(first, PART)
            for n, plane in enumerate(self.operands.planes):
                elements = pl.ds(plane.first + k * plane.size, plane.size)
                source, target = refs["data"].at[e, features, elements], buffers[f"plane{n}"]
                plgpu.copy_gmem_to_smem(source, target.at[stage, half], arrived)
            if groups is None:
                continue
            groups_of_step = pl.ds(0 if groups.is_row else k * groups.of_step, groups.of_step)
            scales = pl.ds(lax.div(first * groups.scales, PART), groups.scales)
            target = buffers["scale"].at[stage, half, :, pl.ds(0, groups.scales)]
            plgpu.copy_gmem_to_smem(refs["scale"].at[e, groups_of_step, scales], target, arrived)
            if "zero" in refs:
                source = refs["zero"].at[e, groups_of_step, features]
                plgpu.copy_gmem_to_smem(source, buffers["zero"].at[stage, half], arrived)

    def _fetch_x(
        self, refs: dict[str, Any], buffers: dict[str, Any], arrived: Any, cursor: Cursor,
        stage: jax.Array,
    ) -> None:  # fmt: skip
        (*_, k), step = cursor, self.operands.step
        b = 0 if refs["x"].shape[0] == 1 else self._block_of_rows(cursor)
        source = refs["x"].at[b, pl.ds(0, self.plan.columns), pl.ds(k * step, step)]
        plgpu.copy_gmem_to_smem(source, buffers["x"].at[stage], arrived.at[stage])

    def _block_of_rows(self, cursor: Cursor) -> jax.Array | int:
        tile, b, _ = cursor
        return b if self.plan.sums_blocks else self.plan.place(tile)[0]

    def _last_operands(self, refs: dict[str, Any], tile: jax.Array) -> "_LastOperands":
        """What a tile's sums meet, read long before it is used."""
        b, nth = self.plan.place(tile)
        e = refs["matrices"][1 + b] if "matrices" in refs else 0
        firsts = [self.plan.first_feature(nth, half) for half in range(self.plan.tiles)]

        def of_features(name: str) -> _Sums | None:
            if name not in refs:
                return None
            vectors = (
                load(refs[name].at[e, pl.ds(first, PART)], None, self.interpret) for first in firsts
            )
            return tuple(vector_F.astype(jnp.float32) for vector_F in vectors)

        factor_W = None
        if "factors" in refs:
            columns = plgpu.Layout.WGMMA.reduce(0)
            factors = refs["factors"].at[e, pl.ds(0, self.plan.columns)]
            factor_W = load(factors, columns, self.interpret)
        return _LastOperands(of_features("row"), of_features("bias"), factor_W)

    # --- products ---------------------------------------------------------------------------------

    def _with_step(self, buffers: dict[str, Any], stage: jax.Array, sums: _Sums) -> _Sums:
        """The sums with a step's products."""
        halves, x_smem, groups = range(self.plan.tiles), buffers["x"].at[stage], self.groups
        boxes: dict[_Key, jax.Array] = {}

        def tile(half: int, pieces: list[_Piece], zero_F: jax.Array | None) -> Callable[[int], Any]:
            """What makes the operand of 64 columns."""
            if (convert := self.operands.part) is None:
                return lambda number: buffers["plane0"].at[
                    stage, half, :, pl.ds(number * PART, PART)
                ]
            for piece in pieces:
                for key in self._keys(half, piece.number):
                    if key not in boxes:
                        boxes[key] = self._box(buffers, stage, key)

            def operand(number: int) -> jax.Array:
                planes = [boxes[key] for key in self._keys(half, number)]
                part_FK = convert(planes, number, self.interpret)
                return part_FK if zero_F is None else part_FK - _spread(zero_F, part_FK)

            return operand

        if groups is None:
            pieces = _pieces(slice(0, self.operands.step))
            tiles = [tile(half, pieces, None) for half in halves]
            return self._products(tiles, pieces, x_smem, sums)
        for group in range(groups.of_step):
            pieces = _pieces(slice(group * groups.size, (group + 1) * groups.size))
            zeros = [self._zeros(buffers, stage, half, group) for half in halves]
            tiles = [tile(half, pieces, zeros[half]) for half in halves]
            together = self.plan.tiles if self.plan.columns <= _COLUMNS_TOGETHER else 1
            group_sums: _Sums = ()
            for at in range(0, self.plan.tiles, together):
                group_sums += self._products(tiles[at : at + together], pieces, x_smem, None)
            scales = [_scales(buffers["scale"].at[stage, half, group], groups) for half in halves]
            sums = tuple(
                sum_FW + group_FW * _spread(scale_F, group_FW)
                for sum_FW, group_FW, scale_F in zip(sums, group_sums, scales, strict=True)
            )
        return sums

    def _keys(self, half: int, number: int) -> list[_Key]:
        """Which boxes have bits of 64 columns of a step."""
        planes = enumerate(self.operands.planes)
        return [(half, n, number * PART // plane.columns) for n, plane in planes]

    def _box(self, buffers: dict[str, Any], stage: jax.Array, key: _Key) -> jax.Array:
        """Reads 128 bytes of 64 rows of a plane into registers."""
        half, n, box = key
        smem = buffers[f"plane{n}"]
        width = ROW_BYTES // smem.dtype.itemsize
        box_FX: jax.Array = smem[stage, half, :, box * width : (box + 1) * width]
        return box_FX

    def _zeros(
        self, buffers: dict[str, Any], stage: jax.Array, half: int, group: int
    ) -> jax.Array | None:
        """bfloat16 [64], what a group's numbers are too large by; None: nothing."""
        if "zero" not in buffers:
            return None
        zero_F = buffers["zero"][stage, half, group].astype(jnp.float32)
        return (zero_F + self.operands.bias).astype(jnp.bfloat16)

    def _products(
        self, tiles: Sequence[Callable[[int], Any]], pieces: list["_Piece"], x_smem: Any,
        sums: _Sums | None,
    ) -> _Sums:  # fmt: skip
        """Sums of each tile's products, from `sums` on or alone: the later ones run while the
        earlier are read.

        Args:
            tiles: what makes a tile's operand [64, 64] of the index of 64 columns.
        """
        if self.interpret:
            nothing = jnp.zeros((PART, self.plan.columns), jnp.float32)
            return tuple(
                sum((_dot(tile(piece.number)[:, piece.inside], x_smem[:, piece.columns])
                     for piece in pieces), nothing if sums is None else sums[half])
                for half, tile in enumerate(tiles)
            )  # fmt: skip

        def multiply(accumulators: tuple[Any, ...]) -> None:
            for tile, accumulator in zip(tiles, accumulators, strict=True):
                for piece in pieces:
                    part = tile(piece.number)
                    part = part if piece.is_whole else part[:, piece.inside]
                    x_KW = x_smem.at[:, piece.columns].transpose((1, 0))
                    plgpu.wgmma(accumulator, part, x_KW)

        def multiply_and_read(*accumulators: Any) -> _Sums:
            multiply(accumulators)
            later = range(len(tiles))[::-1]
            return tuple(
                plgpu.wgmma_accumulator_load(accumulator, wait_n=n * len(pieces))
                for n, accumulator in zip(later, accumulators, strict=True)
            )

        if sums is not None:
            return pl.run_state(multiply)(tuple(map(plgpu.ACC.init, sums)))
        accumulator = plgpu.ACC((PART, self.plan.columns), jnp.float32)
        return pl.run_scoped(multiply_and_read, *(accumulator for _ in tiles))

    # --- sums -------------------------------------------------------------------------------------

    def _leave(
        self, refs: dict[str, Any], out_smem: Any, tile: jax.Array, share: jax.Array, sums: _Sums,
        operands: "_LastOperands",
    ) -> None:  # fmt: skip
        """Writes what the cluster has of a tile, by its last block."""
        # Before a cluster's next tile but one its last block has read the parts of this one.
        plan, place = self.plan, tile
        if not self.interpret:
            places = jnp.int32(plan.places)
            place = lax.axis_index("cluster") * places + lax.rem(tile, places)
        if plan.shares > 1:

            @pl.when(share < plan.shares - 1)
            def _() -> None:
                for half, sum_FW in enumerate(sums):
                    refs["parts"][place, share, half] = sum_FW

            launches.meet_cluster(self.interpret)

        @pl.when(share == plan.shares - 1)
        def _() -> None:
            whole = sums
            for n in range(plan.shares - 1):
                whole = tuple(
                    sum_FW + load(refs["parts"].at[place, n, half], None, self.interpret)
                    for half, sum_FW in enumerate(whole)
                )
            whole = self._of_whole(whole, operands)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left
            for half, sum_FW in enumerate(whole):
                self._store_transposed(out_smem.at[half], sum_FW)
            plgpu.commit_smem()
            b, nth = plan.place(tile)
            for half in range(len(whole)):
                features = pl.ds(plan.first_feature(nth, half), PART)
                box = refs["out"].at[b, pl.ds(0, plan.columns), features]
                plgpu.copy_smem_to_gmem(out_smem.at[half], box)

    def _of_whole(self, sums: _Sums, operands: "_LastOperands") -> _Sums:
        """What leaves of a tile's sums."""
        (row, bias, factor_W), like_FW = operands, sums[0]
        if row is not None:
            sums = tuple(
                sum_FW * _spread(row_F, sum_FW) for sum_FW, row_F in zip(sums, row, strict=True)
            )
        if self.gate is None:
            return sums
        factor_FW = jnp.ones_like(like_FW)
        if factor_W is not None:
            factor_FW = lax.broadcast_in_dim(factor_W, like_FW.shape, (1,))
        if self.weighs_sums:
            sums = tuple(sum_FW * factor_FW for sum_FW in sums)
        if bias is not None:
            sums = tuple(
                sum_FW + _spread(bias_F, sum_FW) for sum_FW, bias_F in zip(sums, bias, strict=True)
            )
        hidden_FW = self.gate(*sums)
        if factor_W is not None:
            weighed_FW = hidden_FW if self.weighs_sums else hidden_FW * factor_FW
            hidden_FW = jnp.where(factor_FW == 0, 0, weighed_FW)
        return (hidden_FW.astype(self.dtype),)

    def _store_transposed(self, smem: Any, sum_FW: jax.Array) -> None:
        """Writes [64, W] as [W, 64]."""
        if self.interpret:
            smem[...] = sum_FW.T
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
        def store(_: object, target: Any, fragments: Any) -> None:
            fragments.foreach(lambda value, at: memref.store(value, target, at[::-1]))

        store(smem, sum_FW)


class _LastOperands(NamedTuple):
    """What a tile's sums meet before they leave; None: there is none.

    Attributes:
        row: scales, float32 [64] of each of a tile's 64 features.
        bias: float32 [64] of the same.
        factor_W: float32, of rows behind a gate; those of 0 leave as 0.
    """

    row: _Sums | None
    bias: _Sums | None
    factor_W: jax.Array | None


class _Piece(NamedTuple):
    """Columns of a step within 64 neighbors.

    Attributes:
        number: of these 64 in the step.
        inside: which of them.
        columns: which of the step.
    """

    number: int
    inside: slice
    columns: slice

    @property
    def is_whole(self) -> bool:
        return self.inside == slice(0, PART)


def _pieces(columns: slice) -> list[_Piece]:
    pieces = []
    for begin in range(columns.start // PART * PART, columns.stop, PART):
        first, last = max(columns.start, begin), min(columns.stop, begin + PART)
        inside = slice(first - begin, last - begin)
        pieces.append(_Piece(begin // PART, inside, slice(first, last)))
    return pieces


def _scales(stored_smem: Any, groups: Groups) -> jax.Array:
    """A group's scales, each of as many features, as float32 [64]."""
    if groups.scales == PART:
        return low_bit.as_float(stored_smem[...], groups.format)
    feature_F = lax.broadcasted_iota(jnp.int32, (PART,), 0)
    scale_F = jnp.full(PART, stored_smem[0])
    for n in range(1, groups.scales):
        scale_F = jnp.where(feature_F < n * PART // groups.scales, scale_F, stored_smem[n])
    return low_bit.as_float(scale_F, groups.format)


def _spread(x_F: jax.Array, like_FX: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_F, like_FX.shape, (0,))


def _dot(part_FK: jax.Array, x_WK: jax.Array) -> jax.Array:
    """The tensor core's product, in interpret mode."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(part_FK, x_WK, dims, preferred_element_type=jnp.float32)
