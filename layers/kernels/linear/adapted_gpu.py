"""What adapters add to products on Hopper GPUs (Pallas, Mosaic GPU), in two launches: A x, and B of
that, which is added to the weight's product in place.

Tokens stay where they are. They lie in tiles of 64, wgmma's rows, and a unit of work is a tile and
a slot that any of its tokens has: the slot's matrices multiply the whole tile, and only rows of its
tokens are written. So nothing is sorted or gathered, a tile's matrices are read once for all of its
tokens, and a row without an adapter is never touched. Which units there are is data: the same
program runs any mixture.

The tensor core's rows are independent of each other. A cluster of blocks divides the depth of A by
the depth alone, and its last block adds the parts in their order. So a row's bits depend on nothing
but the row and its adapter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from layers.kernels.device import target_device
from layers.kernels.linear import launches
from layers.kernels.linear.adapted import NO_SLOT, Adapted
from layers.kernels.linear.skinny_operands import PART
from layers.kernels.registers import load

ROWS = 64  # of a tile
_STEP = 64  # of the depth of A: 128 bytes
_ROW_TILE = 8  # of what the copy engine writes as wgmma reads it
_RANK_STEP = 16  # of wgmma's depth
_MOST_RANKS = 256  # of a slot and a module: what shared memory has room for
_MOST_COLUMNS = 192  # of A's ranks at a time, for which there are registers
_STAGES = 4
_SHARES = 8, 4, 2, 1  # blocks of a cluster
_STEPS_OF_SHARE = 4  # at least, where there are several
_BLOCKS_A_CORE = 2, 4  # of both launches


class _Work(NamedTuple):
    """What both launches do, as arrays in device memory.

    Attributes:
        units: i32[1 + U], how many there are, then which: tile x number of slots + slot.
        slot_T: i32, of the rows of whole tiles; `NO_SLOT` behind the last token.
        ranks_N: i32, 0 of slots whose adapter leaves the matrix alone.
    """

    units: jax.Array
    slot_T: jax.Array
    ranks_N: jax.Array

    @property
    def num_slots(self) -> int:
        return len(self.ranks_N)

    @property
    def most_units(self) -> int:
        return len(self.units) - 1


def can_add(leaf: Adapted) -> bool:
    """Whether the kernels take a leaf: stacks in bfloat16, whose depth and modules are whole
    tiles.
    """
    if not all(isinstance(x, jax.Array) and x.dtype == jnp.bfloat16 for x in (leaf.down, leaf.up)):
        return False
    if leaf.order is None or leaf.ranks_N is None:
        return False
    rank, depth = leaf.up.shape[2], leaf.down.shape[2]
    is_whole = depth % _STEP == 0 and not any(end % PART for end in leaf.module_ends)
    return is_whole and rank % _RANK_STEP == 0 and rank <= _MOST_RANKS


def add(y_TF: jax.Array, x_TD: jax.Array, leaf: Adapted, interpret: object = None) -> jax.Array:
    """The weight's product with what the adapters of its rows add, float32 [T, F], of a leaf that
    `can_add` allows; in place, where y is not used again.

    Args:
        interpret: takes `InterpretGPUParams`.
    """
    assert leaf.order is not None and leaf.ranks_N is not None
    work = _work(leaf.order.slot_T, leaf.ranks_N)
    low_TX = _low(x_TD.astype(jnp.bfloat16), leaf.down, work, interpret)
    return _added(y_TF, low_TX, leaf, work, interpret)


def _work(slot_T: jax.Array, ranks_N: jax.Array) -> _Work:
    """XLA makes it once for all matrices of a step, but for the ranks."""
    T, N = len(slot_T), len(ranks_N)
    slot_T = jnp.pad(slot_T, (0, -T % ROWS), constant_values=NO_SLOT)
    has_slot_IN = (slot_T.reshape(-1, ROWS, 1) == jnp.arange(N)).any(1)
    units = jnp.argsort(~has_slot_IN.reshape(-1), stable=True)[:T].astype(jnp.int32)
    num_units = has_slot_IN.sum(dtype=jnp.int32)
    return _Work(jnp.concatenate([num_units[None], units]), slot_T, ranks_N)


def _first_row(tile: jax.Array, num_rows: int) -> jax.Array:
    """Where the box of a tile begins: the last one ends with the rows."""
    return jnp.minimum(tile * ROWS, jnp.int32(max(0, num_rows - ROWS)))


def _low(x_TD: jax.Array, down: jax.Array, work: _Work, interpret: object) -> jax.Array:
    """A x of each row's adapter, bfloat16 [rows of whole tiles, P R]; other rows are arbitrary."""
    (T, D), (N, X, _) = x_TD.shape, down.shape
    rows = -(-T // _ROW_TILE) * _ROW_TILE
    if interpret or T > _ROW_TILE:  # a box reads zeros beyond the rows' end, if it is the only one
        x_TD = jnp.pad(x_TD, ((0, rows - T), (0, 0)))
    steps, box = D // _STEP, min(rows, ROWS)
    shares = next(n for n in _SHARES if steps >= n * _STEPS_OF_SHARE or n == 1)
    columns = next(n for n in range(min(X, _MOST_COLUMNS), 0, -1) if X % n == 0 and n % 8 == 0)
    parts_of_rank, most = X // columns, work.most_units * (X // columns)
    clusters = max(1, min(most, target_device().num_cores * _BLOCKS_A_CORE[0] // shares))
    stages = min(_STAGES, -(-steps // shares))

    def kernel(x_ref, down_ref, units_ref, slot_ref, ranks_ref, low_ref, *refs, **scratch):
        x_smem, down_smem, arrived = (scratch[name] for name in ("x", "down", "arrived"))
        cluster, share = lax.axis_index("cluster"), lax.axis_index("share")
        launches.await_earlier(interpret)
        start, stop = (n * steps // shares for n in (share, share + 1))
        count = stop - start

        def multiply(nth: jax.Array, num_before: jax.Array) -> None:
            tile, slot = _unit(units_ref, lax.div(nth, jnp.int32(parts_of_rank)), N)
            first = _first_row(tile, rows)
            ranks = pl.ds(lax.rem(nth, jnp.int32(parts_of_rank)) * columns, columns)

            def stage_of(k: jax.Array) -> jax.Array:
                return lax.rem(num_before * count + k, jnp.int32(stages))

            def fetch(k: jax.Array, _: object = None) -> None:
                stage, depth = stage_of(k), pl.ds((start + k) * _STEP, _STEP)
                x_box = x_smem.at[stage, pl.ds(0, box)]
                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(first, box), depth], x_box, arrived.at[stage]
                )
                source = down_ref.at[slot, ranks, depth]
                plgpu.copy_gmem_to_smem(source, down_smem.at[stage], arrived.at[stage])

            def fold(k: jax.Array, sum_WX: jax.Array) -> jax.Array:
                stage = stage_of(k)
                plgpu.barrier_wait(arrived.at[stage])
                sum_WX = _product(x_smem.at[stage], down_smem.at[stage], sum_WX, interpret)
                plgpu.commit_smem()  # every warp has read
                pl.when(k + stages < count)(functools.partial(fetch, k + stages))
                return sum_WX

            lax.fori_loop(0, jnp.minimum(count, stages), fetch, None)
            zeros = jnp.zeros((ROWS, columns), jnp.float32)
            sum_WX = lax.fori_loop(0, count, fold, zeros)
            if shares > 1:
                (parts_ref,) = refs
                # Before a cluster's next unit but one its last block has read the parts of this.
                place = nth if interpret else 2 * cluster + lax.rem(num_before, jnp.int32(2))

                @pl.when(share < shares - 1)
                def _() -> None:
                    parts_ref[place, share] = sum_WX

                launches.meet_cluster(interpret)

            @pl.when(share == shares - 1)
            def _() -> None:
                whole_WX = sum_WX
                for n in range(shares - 1):
                    whole_WX += load(refs[0].at[place, n], plgpu.Layout.WGMMA, interpret)
                is_row_W = _rows_of(slot_ref, tile, slot, first, interpret)
                low = low_ref.at[pl.ds(first, ROWS), ranks]
                _write(low, whole_WX.astype(jnp.bfloat16), is_row_W, False, interpret)

        _for_units(units_ref, ranks_ref, N, parts_of_rank, cluster, clusters, multiply)

    out_rows = max(rows, ROWS)
    outs = [jax.ShapeDtypeStruct((out_rows, X), jnp.bfloat16)]
    if shares > 1:
        places = max(1, most) if interpret else 2 * clusters
        outs.append(jax.ShapeDtypeStruct((places, shares - 1, ROWS, columns), jnp.float32))
    scratch: dict[str, Any] = dict(
        x=plgpu.SMEM((stages, ROWS, _STEP), jnp.bfloat16, transforms=_swizzled(_STEP)),
        down=plgpu.SMEM((stages, columns, _STEP), jnp.bfloat16, transforms=_swizzled(_STEP)),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    )
    grid: dict[str, Any] = dict(
        grid=(clusters,), grid_names=("cluster",), cluster=(shares,), cluster_names=("share",)
    )
    if interpret:  # which runs blocks one after the other, and so needs no cluster
        grid = dict(grid=(clusters, shares), grid_names=("cluster", "share"))
    low_TX, *_ = plgpu.kernel(
        kernel, out_type=outs, scratch_types=scratch, kernel_name="adapters_down",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret, **grid,
    )(x_TD, down, *work)  # fmt: skip
    return low_TX


def _added(
    y_TF: jax.Array, low_TX: jax.Array, leaf: Adapted, work: _Work, interpret: object
) -> jax.Array:
    """y + B low, where a row has an adapter."""
    (T, F), (N, _, R), ends = y_TF.shape, leaf.up.shape, leaf.module_ends
    rows = -(-T // _ROW_TILE) * _ROW_TILE
    num_tiles, box = F // PART, min(T, ROWS)
    most = work.most_units * num_tiles
    blocks = max(1, min(most, target_device().num_cores * _BLOCKS_A_CORE[1]))
    if interpret:
        y_TF, box = jnp.pad(y_TF, ((0, len(low_TX) - T), (0, 0))), ROWS

    def kernel(
        low_ref, up_ref, units_ref, slot_ref, ranks_ref, y_ref, *, low_smem, up_smem, arrived
    ):
        block = lax.axis_index("block")
        launches.await_earlier(interpret)

        def multiply(nth: jax.Array, _: jax.Array) -> None:
            tile, slot = _unit(units_ref, lax.div(nth, jnp.int32(num_tiles)), N)
            first = _first_row(tile, rows)
            first_feature = lax.rem(nth, jnp.int32(num_tiles)) * PART
            columns = pl.ds(first_feature, PART)
            module = sum((jnp.where(first_feature >= end, 1, 0) for end in ends[:-1]), jnp.int32(0))
            ranks = pl.ds(module * R, R)
            plgpu.copy_gmem_to_smem(up_ref.at[slot, columns], up_smem, arrived)
            plgpu.copy_gmem_to_smem(low_ref.at[pl.ds(first, ROWS), ranks], low_smem, arrived)
            plgpu.barrier_wait(arrived)
            zeros = jnp.zeros((ROWS, PART), jnp.float32)
            sum_WF = _product(low_smem, up_smem, zeros, interpret)
            plgpu.commit_smem()  # every warp has read
            is_row_W = _rows_of(slot_ref, tile, slot, first, interpret)
            _write(y_ref.at[pl.ds(first, box), columns], sum_WF, is_row_W, True, interpret)

        _for_units(units_ref, ranks_ref, N, num_tiles, block, blocks, multiply)

    width = next(n for n in (64, 32, 16) if R % n == 0)
    scratch: dict[str, Any] = dict(
        low_smem=plgpu.SMEM((ROWS, R), jnp.bfloat16, transforms=_swizzled(width)),
        up_smem=plgpu.SMEM((PART, R), jnp.bfloat16, transforms=_swizzled(width)),
        arrived=plgpu.Barrier(num_arrivals=2),
    )
    y_ref = jax.new_ref(y_TF, memory_space=plgpu.GMEM)
    run = pl.kernel(  # `plgpu.kernel` takes no arrays to be written in place
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), **scratch),
        out_type=(),
        mesh=plgpu.Mesh(grid=(blocks,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="adapters_up",
        interpret=interpret,
    )
    run(low_TX, leaf.up, *work, y_ref)
    return jax.freeze(y_ref)[:T]


def _for_units(
    units_ref: Any, ranks_ref: Any, num_slots: int, parts: int, first: jax.Array, stride: int,
    multiply: Any,
) -> None:  # fmt: skip
    """Calls `multiply` with every `stride`-th part of all units that change anything, and with how
    many there were before.
    """

    def turn(i: jax.Array, num_before: jax.Array) -> jax.Array:
        nth = first + i * stride
        _, slot = _unit(units_ref, lax.div(nth, jnp.int32(parts)), num_slots)
        changes = ranks_ref[slot] > 0
        pl.when(changes)(functools.partial(multiply, nth, num_before))
        return num_before + jnp.where(changes, 1, 0)

    num_turns = lax.div(units_ref[0] * parts - first + (stride - 1), jnp.int32(stride))
    lax.fori_loop(0, num_turns, turn, jnp.int32(0))


def _unit(units_ref: Any, nth: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Its tile and its slot."""
    unit = units_ref[1 + nth]
    return lax.div(unit, jnp.int32(num_slots)), lax.rem(unit, jnp.int32(num_slots))


def _rows_of(
    slot_ref: Any, tile: jax.Array, slot: jax.Array, first: jax.Array, interpret: object
) -> jax.Array:
    """i32[64], 1 for rows of a box that are the tile's and have the slot."""
    slot_W = load(slot_ref.at[pl.ds(first, ROWS)], plgpu.Layout.WGMMA.reduce(1), interpret)
    row_W = first + lax.iota(jnp.int32, ROWS)
    if not interpret:
        row_W = plgpu.layout_cast(row_W, plgpu.Layout.WGMMA.reduce(1))
    return jnp.where((slot_W == slot) & (row_W >= tile * ROWS), 1, 0)


def _product(x_smem: Any, w_smem: Any, sum_WX: jax.Array, interpret: object) -> jax.Array:
    """The sum and x w^T of [64, K] and [X, K]."""
    if interpret:
        dims = (((1,), (1,)), ((), ()))
        return sum_WX + lax.dot_general(
            x_smem[...], w_smem[...], dims, preferred_element_type=jnp.float32
        )

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, x_smem, w_smem.transpose((1, 0)))

    return pl.run_state(multiply)(plgpu.ACC.init(sum_WX))


def _write(ref: Any, x_WX: jax.Array, is_row_W: jax.Array, adds: bool, interpret: object) -> None:
    """Writes rows of a tile that are chosen to device memory, or adds them to what is there."""
    is_row_WX = lax.broadcast_in_dim(is_row_W, x_WX.shape, (0,))
    if interpret:
        before_WX = ref[...]
        ref[...] = jnp.where(is_row_WX != 0, before_WX + x_WX if adds else x_WX, before_WX)
        return
    layout = plgpu.Layout.WGMMA
    write = _add_rows if adds else _store_rows
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))(write)(ref, x_WX, is_row_WX)


def _store_rows(context: Any, target: Any, x_WX: Any, is_row_WX: Any) -> None:
    """Two neighbors of bfloat16 a thread and a store; four threads write a sector."""
    i32 = ir.IntegerType.get_signless(32)
    for index, address, is_row in _pairs(target, x_WX, is_row_WX):
        both = utils.bitcast(x_WX.registers[index], i32)
        store = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.b32 [$1], $2; }"
        _ptx("!llvm.void", store, [is_row, address, both], "r,l,r")


def _add_rows(context: Any, target: Any, x_WX: Any, is_row_WX: Any) -> None:
    """Two neighbors of float32 a thread; all loads are on their way before the first is used."""
    pairs = list(_pairs(target, x_WX, is_row_WX))
    read = (
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
        "@p ld.global.v2.f32 {$0, $1}, [$3]; }"
    )
    store = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v2.f32 [$1], {$2, $3}; }"
    f32 = ir.F32Type.get()
    before = [
        _ptx("!llvm.struct<(f32, f32)>", read, [is_row, address], "=&f,=&f,r,l")
        for _, address, is_row in pairs
    ]
    for (index, address, is_row), both in zip(pairs, before, strict=True):
        sums = [
            arith.addf(llvm.extractvalue(f32, both, [n]), _element(x_WX.registers[index], n))
            for n in range(2)
        ]
        _ptx("!llvm.void", store, [is_row, address, *sums], "r,l,f,f")


def _pairs(target: Any, x_WX: Any, is_row_WX: Any) -> Any:
    """Of each register: its index, its address in the target, and whether its row is chosen."""
    i64 = ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(target.type)
    (stride, _), _ = kind.get_strides_and_offset()
    num_bytes = utils.bitwidth(kind.element_type) // 8
    base = llvm.ptrtoint(i64, utils.memref_ptr(target))
    places = x_WX.layout.thread_idxs(x_WX.shape)
    for index, (row, column) in zip(np.ndindex(x_WX.registers.shape), places, strict=True):
        row, column = arith.index_cast(i64, row), arith.index_cast(i64, column)
        element = arith.addi(arith.muli(row, utils.c(stride, i64)), column)
        address = arith.addi(base, arith.muli(element, utils.c(num_bytes, i64)))
        yield index, address, _element(is_row_WX.registers[index], 0)


def _element(register: Any, n: int) -> Any:
    position = ir.DenseI64ArrayAttr.get([n])
    return vector.extract(register, dynamic_position=[], static_position=position)


def _ptx(result: str, text: str, operands: list[Any], constraints: str) -> Any:
    return llvm.inline_asm(
        ir.Type.parse(result), operands, text, f"{constraints},~{{memory}}", has_side_effects=True
    )


def _swizzled(columns: int) -> tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...]:
    """Tiles of 8 rows of bfloat16, as wgmma reads its operands."""
    return plgpu.TilingTransform((_ROW_TILE, columns)), plgpu.SwizzleTransform(2 * columns)
