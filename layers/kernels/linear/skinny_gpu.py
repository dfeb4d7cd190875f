"""Products of up to 64 rows with a matrix on Hopper GPUs (Pallas, Mosaic GPU), of every format: a
byte of the matrix is read once, its numbers exist in registers only, and one launch takes rows as
they are and leaves sums as the next operation reads them.

Features are wgmma's 64 rows, rows of activations its columns: [64 features, W]. A block of threads
is one warpgroup and has two such tiles, neighbors or, under a gate, the same features of both
halves of the matrix: their steps along D share activations, and one's product runs while the
other's operand is converted. A step is 128 bytes of each feature's row or more; it comes by the
copy engine (TMA), further ones on their way while it is used. Two blocks share a multiprocessor and
no barrier. So one multiplies while the other waits, as two warpgroups of a block would. A warpgroup
of its own for the copies would take registers and issue nothing more.

A cluster of up to 8 blocks shares the steps of its tiles, and has as many tiles as every other, or
one less. Each block leaves its part of a tile's sums in memory; after the cluster's barrier the
last one adds them in their order. So bits do not depend on time, and no counter is reset.

Weights of which each group of a row has a scale are multiplied as the format's own numbers, which
are exact in bfloat16, and a group's sums are weighed.

X counts shares, H tiles of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm, memref

from configs.precision import FORMATS
from layers.kernels.device import target_device
from layers.kernels.linear import low_bit, skinny_operands
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.skinny_operands import PART, ROW_BYTES, Operands

_MOST_ROWS = 64
_ROW_TILE = 8  # of wgmma's columns
_BLOCKS_A_CORE = 2
_SHARED_BYTES = 208 << 10  # of a multiprocessor, but for what blocks reserve
_MOST_STAGES = 8
_SHARES = 1, 2, 4, 8  # blocks of a cluster; more are not portable


class _Weights(NamedTuple):
    """A stack of matrices [E, F, D], its parts as the kernel reads them.

    Attributes:
        data: [E, F, elements of a row].
        scale, zero: of groups, [E, G, F or fewer], or None.
        row: float32 [E, F] that multiplies a row's sums, or None.
    """

    data: jax.Array
    scale: jax.Array | None
    zero: jax.Array | None
    row: jax.Array | None


class _Plan(NamedTuple):
    """How a product is divided.

    Attributes:
        row_tiles: columns of wgmma's products.
        halves: tiles of 64 features of a block.
        stages: steps that are on their way or used.
        shares: blocks of a cluster.
        clusters: of the grid.
    """

    columns: int
    halves: int
    stages: int
    shares: int
    clusters: int


def can_multiply(num_rows: int, w: jax.Array | Quantized) -> bool:
    """Whether the kernel multiplies such rows with (a matrix of) w."""
    *_, F, D = w.shape
    if str(w.dtype) != "bfloat16" or num_rows > _MOST_ROWS or F % PART:
        return False
    if isinstance(w, Quantized):
        info = FORMATS[w.format]
        is_packed_otherwise = info.bits < 8 and w.data.dtype != jnp.uint16
        if info.activations is not None or is_packed_otherwise:
            return False
    operands = _operands(w)
    return D % operands.step == 0 and _stages(num_rows, w) >= 2


def products(
    x_BWD: jax.Array,
    w: jax.Array | Quantized,
    matrix_B: jax.Array | None,
    *,
    prefetch: bool = False,
    interpret: object = None,
) -> jax.Array:
    """Blocks of rows that `can_multiply` allows, each with one matrix of a stack [E, F, D], or one
    block with a matrix [F, D]: float32 [B, W, F]. `matrix_B` (i32) of E is none, of the last blocks
    only; these are arbitrary.

    Args:
        prefetch: no launch of the program writes w, so it is read before these end.
        interpret: `InterpretGPUParams`: interpreted, on any device.
    """
    return _run(x_BWD, w, matrix_B, None, "float32", prefetch, interpret)


def _run(
    x_BWD: jax.Array, w: jax.Array | Quantized, matrix_B: jax.Array | None,
    gate: Callable[[jax.Array], jax.Array] | None, dtype: str, prefetch: bool, interpret: object,
) -> jax.Array:  # fmt: skip
    weights, operands = _weights(w), _operands(w)
    x_BWD = x_BWD.astype(jnp.bfloat16)
    (B, W, D), (E, F, _) = x_BWD.shape, weights.data.shape
    plan = _plan(B, W, w, gate is not None)
    columns, halves, num_stages, shares, num_clusters = plan
    if interpret:  # which has no boxes beyond an array's end, where a GPU's are zeros
        x_BWD = jnp.pad(x_BWD, ((0, 0), (0, columns - W), (0, 0)))
    groups = None if weights.scale is None else weights.scale.shape[1]
    size = D if groups is None else -(-D // groups)
    num_groups = max(1, operands.step // size)  # of a step
    num_tiles, num_steps = F // (PART * halves), D // operands.step
    out_features = F if gate is None else F // 2
    inputs = [x_BWD, weights.data]
    inputs += [array for array in weights[1:] if array is not None]
    if matrix_B is not None:
        num_blocks = (matrix_B < E).sum(dtype=jnp.int32)
        inputs.append(jnp.concatenate([matrix_B, num_blocks[None]]))
    num_scales = 0 if weights.scale is None else PART * weights.scale.shape[2] // F

    def kernel(*refs, stage_smem, out_smem):
        refs = list(refs)
        x_ref, data_ref = refs.pop(0), refs.pop(0)
        scale_ref, zero_ref, row_ref = (
            None if array is None else refs.pop(0) for array in weights[1:]
        )
        matrix_ref = None if matrix_B is None else refs.pop(0)
        out_ref, *parts_refs = refs
        cluster, share = lax.axis_index("cluster"), lax.axis_index("share")
        start, stop = (n * num_steps // shares for n in (share, share + 1))

        def matrix(b):
            return 0 if matrix_ref is None else matrix_ref[b]

        def features(tile, half):
            """The first of a tile's half."""
            if gate is None:
                return (tile * halves + half) * PART
            return tile * PART + half * (F // 2)

        def place(tile):
            """A tile's block of rows and its number within."""
            return (0, tile) if B == 1 else (lax.div(tile, num_tiles), lax.rem(tile, num_tiles))

        def fetch_weights(tile, k, stage):
            b, nth = place(tile)
            e = matrix(b)
            arrived = stage_smem["weights_arrived"].at[stage]
            for half in range(halves):
                first = features(nth, half)
                box = pl.ds(first, PART)
                for n, plane in enumerate(operands.planes):
                    source = data_ref.at[e, box, pl.ds(plane.first + k * plane.size, plane.size)]
                    target = stage_smem[f"plane{n}"].at[stage, half]
                    plgpu.copy_gmem_to_smem(source, target, arrived)
                own_groups = pl.ds(k * num_groups, num_groups)
                if scale_ref is not None:
                    box = pl.ds(lax.div(first * num_scales, PART), num_scales)
                    target = stage_smem["scale"].at[stage, half, :, pl.ds(0, num_scales)]
                    plgpu.copy_gmem_to_smem(scale_ref.at[e, own_groups, box], target, arrived)
                if zero_ref is not None:
                    source = zero_ref.at[e, own_groups, pl.ds(first, PART)]
                    plgpu.copy_gmem_to_smem(source, stage_smem["zero"].at[stage, half], arrived)

        def fetch_rows(tile, k, stage):
            b, _ = place(tile)
            source = x_ref.at[b, pl.ds(0, columns), pl.ds(k * operands.step, operands.step)]
            arrived = stage_smem["rows_arrived"].at[stage]
            plgpu.copy_gmem_to_smem(source, stage_smem["rows"].at[stage], arrived)

        def advanced(tile, k):
            """The step after."""
            is_last = k + 1 == stop
            return jnp.where(is_last, tile + 1, tile), jnp.where(is_last, start, k + 1)

        def stored(stage, half):
            """A step's data in registers, of each plane in boxes of 128 bytes."""
            width = ROW_BYTES // weights.data.dtype.itemsize
            return [
                [stage_smem[f"plane{n}"][stage, half, :, at : at + width]
                 for at in range(0, plane.size, width)]
                for n, plane in enumerate(operands.planes)
            ]  # fmt: skip

        def add_step(stage, sums):
            """The sums with a step's products."""
            data = [() if operands.part is None else stored(stage, half) for half in range(halves)]

            def operand(half, group, index):
                """Of 64 columns."""
                if operands.part is None:
                    return stage_smem["plane0"].at[stage, half, :, pl.ds(index * PART, PART)]
                return zeroed(operands.part(data[half], index, interpret), stage, half, group)

            def multiplied(group, sums):
                pieces = _pieces(group, size, operands.step)
                tiles = [functools.partial(operand, half, group) for half in range(halves)]
                return _products(tiles, pieces, stage_smem["rows"].at[stage], sums, interpret)

            if groups is None:
                return multiplied(0, sums)
            for group in range(num_groups):
                group_sums = multiplied(group, (None,) * halves)
                scales = [scale(stage, half, group) for half in range(halves)]
                sums = tuple(
                    sum_FW + group_FW * lax.broadcast_in_dim(scale_F, group_FW.shape, (0,))
                    for sum_FW, group_FW, scale_F in zip(sums, group_sums, scales, strict=True)
                )
            return sums

        def zeroed(part, stage, half, group):
            if zero_ref is None:
                return part
            zero_F = stage_smem["zero"][stage, half, group].astype(jnp.float32) + operands.bias
            return part - lax.broadcast_in_dim(zero_F.astype(jnp.bfloat16), part.shape, (0,))

        def scale(stage, half, group):
            stored = _of_features(stage_smem["scale"].at[stage, half, group], num_scales)
            return low_bit.as_float(stored, w.format)

        is_early = prefetch and matrix_ref is None
        if not is_early:
            _await_launch(interpret)
        num_blocks = B if matrix_ref is None else matrix_ref[B]
        first, last = (n * num_blocks * num_tiles // num_clusters for n in (cluster, cluster + 1))
        count = (last - first) * (stop - start)

        def ahead(fetch):
            def body(n, cursor):
                fetch(*cursor, n)
                return advanced(*cursor)

            return lax.fori_loop(0, jnp.minimum(count, num_stages), body, (first, start))

        ahead(fetch_weights)
        if is_early:
            _await_launch(interpret)
        cursor = ahead(fetch_rows)

        def fold_tile(tile, cursor):
            b, nth = place(tile)
            row = () if row_ref is None else tuple(
                _load(row_ref, (matrix(b), pl.ds(features(nth, half), PART)), interpret) for half in range(halves)
            )

            def fold(k, carry):
                sums, cursor = carry
                n = (tile - first) * (stop - start) + k - start
                stage = lax.rem(n, jnp.int32(num_stages))
                plgpu.barrier_wait(stage_smem["weights_arrived"].at[stage])
                plgpu.barrier_wait(stage_smem["rows_arrived"].at[stage])
                sums = add_step(stage, sums)
                plgpu.commit_smem()  # every warp has read

                @pl.when(n + num_stages < count)
                def _():
                    fetch_weights(*cursor, stage)
                    fetch_rows(*cursor, stage)

                return sums, advanced(*cursor)

            zeros = tuple(jnp.zeros((PART, columns), jnp.float32) for _ in range(halves))
            sums, cursor = lax.fori_loop(start, stop, fold, (zeros, cursor))
            for parts_ref in parts_refs:
                @pl.when(share < shares - 1)
                def _():
                    for half, sum_FW in enumerate(sums):
                        parts_ref[tile, share, half] = sum_FW

                _meet(interpret)

            @pl.when(share == shares - 1)
            def _():
                whole = sums
                for parts_ref in parts_refs:
                    for n in range(shares - 1):
                        whole = tuple(
                            sum_FW + _load(parts_ref, (tile, n, half), interpret) for half, sum_FW in enumerate(whole)
                        )
                if row:
                    whole = tuple(
                        sum_FW * lax.broadcast_in_dim(row_F, sum_FW.shape, (0,))
                        for sum_FW, row_F in zip(whole, row, strict=True)
                    )
                if gate is not None:
                    whole = ((gate(whole[0]) * whole[1]).astype(dtype),)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left
                for half, sum_FW in enumerate(whole):
                    _store_transposed(out_smem.at[half], sum_FW, interpret)
                plgpu.commit_smem()
                for half in range(len(whole)):
                    target = out_ref.at[b, pl.ds(0, columns), pl.ds(features(nth, half), PART)]
                    plgpu.copy_smem_to_gmem(out_smem.at[half], target)

            return cursor

        lax.fori_loop(first, last, fold_tile, cursor)
        plgpu.wait_smem_to_gmem(0)

    scratch = _stage_buffers(plan, weights, operands, size, num_groups, num_scales)
    out_tiles = halves if gate is None else 1
    outs = [jax.ShapeDtypeStruct((B, columns if interpret else W, out_features), dtype)]
    if shares > 1:
        parts = (B * num_tiles, shares - 1, halves, PART, columns)
        outs.append(jax.ShapeDtypeStruct(parts, jnp.float32))
    axes: dict[str, Any] = (
        dict(grid=(num_clusters, shares), grid_names=("cluster", "share")) if interpret else
        dict(grid=(num_clusters,), grid_names=("cluster",), cluster=(shares,), cluster_names=("share",))
    )
    y_BWF, *_ = plgpu.kernel(
        kernel,
        out_type=outs,
        scratch_types=dict(
            stage_smem=scratch, out_smem=plgpu.SMEM((out_tiles, columns, PART), jnp.dtype(dtype))
        ),
        **axes,
        kernel_name="skinny_product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*inputs)
    return y_BWF[:, :W]


def _weights(w: jax.Array | Quantized) -> _Weights:
    stack = jax.tree.map(lambda array: array[None], w) if len(w.shape) == 2 else w
    if not isinstance(w, Quantized):
        return _Weights(stack, None, None, None)
    data = stack.data
    if data.dtype == jnp.uint8:
        data = lax.bitcast_convert_type(data, jnp.int8)
    if low_bit.has_groups(w):
        return _Weights(data, stack.scale, stack.zero, stack.row)
    return _Weights(data, None, None, stack.scale[:, 0])


def _operands(w: jax.Array | Quantized) -> Operands:
    is_low = isinstance(w, Quantized)
    format = w.format if is_low else "bfloat16"
    return skinny_operands.of(format, w.shape[-1], is_low and w.zero is not None)


def _stages(num_rows: int, w: jax.Array | Quantized) -> int:
    """Steps that fit into a block's shared memory."""
    columns = -(-num_rows // _ROW_TILE) * _ROW_TILE
    operands = _operands(w)
    *_, F, D = w.shape
    row_bytes = operands.step * (FORMATS[w.format].bits if isinstance(w, Quantized) else 16) // 8
    stage = 2 * PART * row_bytes + columns * operands.step * 2
    if isinstance(w, Quantized) and low_bit.has_groups(w):
        groups = max(1, operands.step * w.scale.shape[-2] // D)
        stage += 2 * groups * PART * (w.scale.dtype.itemsize + (w.zero is not None))
    fixed = 2 * PART * columns * 4 + (2 << 10)
    blocks = _BLOCKS_A_CORE if 2 * stage + fixed <= _SHARED_BYTES // _BLOCKS_A_CORE else 1
    return min(_MOST_STAGES, (_SHARED_BYTES // blocks - fixed) // stage)


def _plan(num_blocks: int, num_rows: int, w: jax.Array | Quantized, is_gated: bool) -> _Plan:
    """The shares by which the blocks have the fewest steps, of these the fewest shares."""
    *_, F, D = w.shape
    halves = 2 if is_gated or F // PART % 2 == 0 else 1
    steps, cores = D // _operands(w).step, target_device().num_cores

    def rounds(shares: int, features: int) -> int:
        tiles = -(-num_blocks * F // features)
        return -(-tiles // max(1, cores // shares * _BLOCKS_A_CORE))

    # By the matrix alone, since the order of sums must not depend on the number of rows.
    usable = [shares for shares in _SHARES if shares <= steps]
    shares = min(usable, key=lambda n: rounds(n, 2 * PART) * -(-steps // n))
    tiles = num_blocks * F // (PART * halves)
    clusters = -(-tiles // rounds(shares, PART * halves))
    columns = -(-num_rows // _ROW_TILE) * _ROW_TILE
    return _Plan(columns, halves, _stages(num_rows, w), shares, clusters)


def _stage_buffers(
    plan: _Plan, weights: _Weights, operands: Operands, size: int, num_groups: int, num_scales: int
) -> dict[str, pl.MemoryRef | plgpu.Barrier]:
    """Arrays and barriers of all stages."""
    stages, halves = plan.stages, plan.halves
    buffers: dict[str, pl.MemoryRef | plgpu.Barrier] = {}
    for n, plane in enumerate(operands.planes):
        buffers[f"plane{n}"] = plgpu.SMEM(
            (stages, halves, PART, plane.size), weights.data.dtype,
            transforms=_swizzled(weights.data.dtype, 128),
        )  # fmt: skip
    columns = min(PART, size)  # of a group are whole tiles
    buffers["rows"] = plgpu.SMEM(
        (stages, plan.columns, operands.step), jnp.bfloat16,
        transforms=_swizzled(jnp.bfloat16, 2 * columns),
    )  # fmt: skip
    num_copies = len(operands.planes)
    if weights.scale is not None:
        width = max(num_scales, 128 // weights.scale.dtype.itemsize // num_groups)
        shape = stages, halves, num_groups, width
        buffers["scale"] = plgpu.SMEM(shape, weights.scale.dtype)
        num_copies += 1
    if weights.zero is not None:
        buffers["zero"] = plgpu.SMEM((stages, halves, num_groups, PART), weights.zero.dtype)
        num_copies += 1
    buffers["weights_arrived"] = plgpu.Barrier(
        num_arrivals=num_copies * halves, num_barriers=stages
    )
    buffers["rows_arrived"] = plgpu.Barrier(num_barriers=stages)
    return buffers


def _swizzled(dtype: jax.typing.DTypeLike, row_bytes: int):
    tile = 8, row_bytes // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform(tile), plgpu.SwizzleTransform(row_bytes)


def _pieces(group: int, size: int, step: int) -> list[tuple[int, slice, slice]]:
    """What a group has of a step: indices of 64 columns, which of these, and which of the step."""
    start, stop = group * size, min((group + 1) * size, step)
    pieces = []
    for index in range(start // PART, -(-stop // PART)):
        begin = index * PART
        first, last = max(start, begin), min(stop, begin + PART)
        pieces.append((index, slice(first - begin, last - begin), slice(first, last)))
    return pieces


def _products(tiles, pieces, rows_smem, sums, interpret: object):
    """Sums of each tile's products, [64, W], from `sums` on or alone: the later ones run while the
    earlier are read.

    Args:
        tiles: what makes a tile's operand [64, 64] of the index of 64 columns.
        pieces: as `_pieces` has them.
    """
    if interpret:
        return tuple(
            sum((_dot(tile(index)[:, inside], rows_smem[:, columns])
                 for index, inside, columns in pieces), 0 if sum_FW is None else sum_FW)
            for tile, sum_FW in zip(tiles, sums, strict=True)
        )  # fmt: skip
    is_new = sums[0] is None

    def run(*accumulators):
        for tile, accumulator in zip(tiles, accumulators, strict=True):
            for index, inside, columns in pieces:
                part = tile(index)
                part = part if inside == slice(0, PART) else part[:, inside]
                plgpu.wgmma(accumulator, part, rows_smem.at[:, columns].transpose((1, 0)))
        if is_new:
            return tuple(
                plgpu.wgmma_accumulator_load(accumulator, wait_n=later * len(pieces))
                for later, accumulator in zip(range(len(tiles))[::-1], accumulators, strict=True)
            )

    if is_new:
        shape = PART, rows_smem.shape[0]
        return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for _ in tiles))
    return pl.run_state(lambda refs: run(*refs))(tuple(map(plgpu.ACC.init, sums)))


def _dot(part_FK: jax.Array, x_WK: jax.Array) -> jax.Array:
    """The tensor core's product, in interpret mode."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(part_FK, x_WK, dims, preferred_element_type=jnp.float32)


def _of_features(scale_smem, num_scales: int) -> jax.Array:
    """A group's scales, each of as many features, as [64]."""
    if num_scales == PART:
        return scale_smem[...]
    feature_F = lax.broadcasted_iota(jnp.int32, (PART,), 0)
    scale_F = jnp.full(PART, scale_smem[0])
    for n in range(1, num_scales):
        scale_F = jnp.where(feature_F < n * PART // num_scales, scale_F, scale_smem[n])
    return scale_F


def _load(ref, index, interpret: object) -> jax.Array:
    """Of global memory, as each thread needs it."""
    return ref[index] if interpret else plgpu.load(ref, index, optimized=False)


def _store_transposed(smem, sum_FW: jax.Array, interpret: object) -> None:
    """[64, W] as [W, 64]."""
    if interpret:
        smem[...] = sum_FW.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, target, fragments):
        fragments.foreach(lambda value, at: memref.store(value, target, at[::-1]))

    store(smem, sum_FW)


def _await_launch(interpret: object) -> None:
    """Waits for the launches before, whose results are read from here on."""
    if not interpret:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def _meet(interpret: object) -> None:
    """Waits for the cluster's blocks, whose writes are visible then."""
    if interpret:  # blocks run one after the other
        return

    @plgpu.inline_mgpu()
    def meet(_):
        asm = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(None, [], asm, "~{memory}", has_side_effects=True)

    meet()
