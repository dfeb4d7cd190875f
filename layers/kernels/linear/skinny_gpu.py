"""Products of few rows with a matrix on Hopper GPUs (Pallas, Mosaic GPU), of all formats of weights
alone; up to 64 rows, fewer where groups are small. A byte of the matrix is read once, its numbers
exist in registers only, and one launch leaves sums, or what a gate makes of them, as the next
operation reads them.

Features are wgmma's 64 rows, rows of activations its columns (`skinny_block.py`). A block of
threads is one warpgroup and has two tiles of 64 features, neighbors or, under a gate, the same of
both halves of the matrix. Two blocks share a multiprocessor and no barrier, so that one multiplies
while the other waits, as two warpgroups of a block would. A warpgroup of its own for the copies
would take registers and issue nothing more.

A cluster of up to 8 blocks shares the steps of its tiles along D, and has as many tiles as every
other, or one less. Each block leaves its part of a tile's sums in memory; after the cluster's
barrier the last one adds them in their order. So a row's bits depend neither on time nor on other
rows, and there is no counter to reset.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.precision import FORMATS
from layers.kernels.device import target_device
from layers.kernels.linear import low_bit, skinny_operands
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.skinny_block import Block, Gate, Groups, Plan, Weights
from layers.kernels.linear.skinny_operands import PART, ROW_BYTES

_MOST_ROWS = 64
_ROW_TILE = 8  # of wgmma's columns
_BLOCKS_A_CORE = 2
_SHARED_BYTES = 208 << 10  # of a multiprocessor, but for what blocks reserve
_MOST_STAGES = 8
GATES: dict[str, Gate] = {
    "silu": lambda gate_FW, up_FW: jax.nn.silu(gate_FW) * up_FW,
    "gelu_tanh": lambda gate_FW, up_FW: jax.nn.gelu(gate_FW, approximate=True) * up_FW,
}
_SHARES = 1, 2, 4, 8  # blocks of a cluster; more are not portable
_STEPS_OF_SUM = 2  # about as long as these a cluster takes to sum a tile


def can_multiply(num_rows: int, w: jax.Array | Quantized) -> bool:
    """Whether the kernel multiplies such rows with (a matrix of) w."""
    *_, F, D = w.shape
    if str(w.dtype) != "bfloat16" or F % PART or num_rows < 1:
        return False
    if isinstance(w, Quantized):
        info = FORMATS[w.format]
        if info.activations is not None or (info.bits < 8 and w.data.dtype != jnp.uint16):
            return False
    return _fits(num_rows, w, False) and D % skinny_operands.of(w).step == 0


def can_gate(num_rows: int, w: jax.Array | Quantized) -> bool:
    """Whether the kernel multiplies such rows with a matrix and applies a gate."""
    return can_multiply(num_rows, w) and _tiles(num_rows, w) == 2


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
    return _differentiable(x_BWD, w, matrix_B, None, "float32", prefetch, interpret)


def gated_products(
    x_BWD: jax.Array,
    w: jax.Array | Quantized,
    matrix_B: jax.Array | None,
    activation: str,
    dtype: str,
    *,
    prefetch: bool = False,
    interpret: object = None,
) -> jax.Array:
    """act(gate) up of `products` that `can_gate` allows, gates first: `dtype` [B, W, F / 2]. The
    activation is one of `GATES`.
    """
    return _differentiable(x_BWD, w, matrix_B, GATES[activation], dtype, prefetch, interpret)


def can_sum(num_rows: int, w: jax.Array | Quantized) -> bool:
    """Whether `sum_of_products` takes such rows and w, whose rows have no scales beside groups'."""
    if isinstance(w, Quantized) and w.row is not None:
        return False
    return can_multiply(num_rows, w) and _fits(num_rows, w, True)


def expert_products(
    x_WD: jax.Array,
    w: jax.Array | Quantized,
    matrices: jax.Array,
    num_blocks: int,
    gate: Gate,
    factors_EW: jax.Array,
    bias_EF: jax.Array | None = None,
    *,
    top_k: int,
    weighs_inputs: bool = False,
    interpret: object = None,
) -> jax.Array:
    """What gates make of all rows' products with several matrices of a stack that `can_gate`
    allows, times factors: bfloat16 [B, W, F / 2], W a multiple of 8. Rows whose factor is 0 are 0.

    Args:
        matrices: i32, how many matrices, at most B, and then which.
        num_blocks: B.
        gate: (gates, what they meet), float32 -> float32.
        factors_EW: float32, 0 for rows that are not there.
        bias_EF: of the products.
        top_k: matrices of a row. The order of sums depends on them, not on B.
        weighs_inputs: factors multiply the products, before the bias and the gate.
    """
    plan = _plan(num_blocks, len(x_WD), w, True, top_k)
    extras = {"factors": factors_EW}
    if bias_EF is not None:
        extras["bias"] = bias_EF
    return _launch(
        x_WD[None], plan.columns, w, matrices, extras, plan, gate, "bfloat16", False, interpret,
        weighs_inputs,
    )  # fmt: skip


def sum_of_products(
    x_BWD: jax.Array,
    num_rows: int,
    w: jax.Array | Quantized,
    matrices: jax.Array,
    *,
    interpret: object = None,
) -> jax.Array:
    """The sum of blocks' products with one matrix each, in the order of blocks: float32 [T, F] of
    the first T rows. `can_sum` allows them and the stack; blocks and `matrices` are those of
    `expert_products`.
    """
    plan = _plan(1, num_rows, w, False, sums_blocks=True)._replace(num_blocks=len(x_BWD))
    return _launch(x_BWD, num_rows, w, matrices, {}, plan, None, "float32", False, interpret)[0]


def _differentiable(
    x_BWD: jax.Array, w: jax.Array | Quantized, matrix_B: jax.Array | None, gate: Gate | None,
    dtype: str, prefetch: bool, interpret: object,
) -> jax.Array:  # fmt: skip
    """`_run`, with the derivatives of XLA's products of what is no `Quantized`."""

    def run(x_BWD: jax.Array, w: Any) -> jax.Array:
        return _run(x_BWD, w, matrix_B, gate, dtype, prefetch, interpret)

    def by_xla(x_BWD: jax.Array, w_EFD: jax.Array) -> jax.Array:
        last = w_EFD.shape[0] - 1
        w_BFD = w_EFD[None] if matrix_B is None else w_EFD[jnp.minimum(matrix_B, last)]
        x_BWD = x_BWD.astype(w_EFD.dtype)
        y_BWF = jnp.einsum("bwd,bfd->bwf", x_BWD, w_BFD, preferred_element_type=jnp.float32)
        if gate is None:
            return y_BWF
        return gate(*jnp.split(y_BWF, 2, axis=-1)).astype(dtype)

    if isinstance(w, Quantized):
        return run(x_BWD, w)
    function = jax.custom_jvp(run)
    function.defjvp(lambda primals, tangents: jax.jvp(by_xla, primals, tangents))
    return function(x_BWD, w)


def _run(
    x_BWD: jax.Array, w: jax.Array | Quantized, matrix_B: jax.Array | None, gate: Gate | None,
    dtype: str, prefetch: bool, interpret: object,
) -> jax.Array:  # fmt: skip
    B, W, _ = x_BWD.shape
    plan = _plan(B, W, w, gate is not None, least_blocks=1)
    if matrix_B is not None:
        num_matrices = (matrix_B < w.shape[0]).sum(dtype=jnp.int32)
        matrix_B = jnp.concatenate([num_matrices[None], matrix_B])
    return _launch(x_BWD, W, w, matrix_B, {}, plan, gate, dtype, prefetch, interpret)


def _launch(
    x_BWD: jax.Array, num_rows: int, w: jax.Array | Quantized, matrices: jax.Array | None,
    extras: dict[str, jax.Array], plan: Plan, gate: Gate | None, dtype: str, prefetch: bool,
    interpret: object, weighs_sums: bool = False,
) -> jax.Array:  # fmt: skip
    """Results of so many rows."""
    weights, W = _weights(w, plan.sums_blocks), x_BWD.shape[1]
    x_BWD = x_BWD.astype(jnp.bfloat16)
    # A box reads zeros beyond the rows' end, if it is the only one; the interpreter knows no such.
    if interpret or W > _ROW_TILE:
        x_BWD = jnp.pad(x_BWD, ((0, 0), (0, plan.columns - W), (0, 0)))
    block = Block(
        plan, skinny_operands.of(w), _groups(w, plan.sums_blocks), gate, jnp.dtype(dtype),
        prefetch and matrices is None, interpret, weighs_sums,
    )  # fmt: skip
    inputs: dict[str, jax.Array] = {"x": x_BWD}
    inputs |= {name: array for name, array in weights._asdict().items() if array is not None}
    inputs |= extras
    if matrices is not None:
        inputs["matrices"] = matrices
    features = plan.features if gate is None else plan.features // 2
    out = plan.num_results, plan.columns if interpret else num_rows, features
    outs = {"out": jax.ShapeDtypeStruct(out, dtype)}
    if plan.shares > 1:
        num_places = plan.clusters * plan.places
        places = plan.num_results * plan.num_tiles if interpret else num_places
        parts = places, plan.shares - 1, plan.tiles, PART, plan.columns
        outs["parts"] = jax.ShapeDtypeStruct(parts, jnp.float32)
    names = [*inputs, *outs]

    def kernel(*refs: Any, **scratch: Any) -> None:
        block.run(dict(zip(names, refs, strict=True)), **scratch)

    y_BWF, *_ = plgpu.kernel(
        kernel,
        out_type=list(outs.values()),
        scratch_types=_scratch(block, weights),
        **_grid(plan, interpret),
        kernel_name="skinny_product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*inputs.values())
    return y_BWF[:, :num_rows]


def _grid(plan: Plan, interpret: object) -> dict[str, Any]:
    """The interpreter runs blocks one after the other, and so needs no cluster."""
    if interpret:
        return dict(grid=(plan.clusters, plan.shares), grid_names=("cluster", "share"))
    return dict(
        grid=(plan.clusters,), grid_names=("cluster",), cluster=(plan.shares,),
        cluster_names=("share",),
    )  # fmt: skip


def _weights(w: jax.Array | Quantized, sums_blocks: bool) -> Weights:
    """Where sums go on from one matrix to the next, rows' scales are those of one group."""
    if not isinstance(w, Quantized):
        return Weights(w.reshape(-1, *w.shape[-2:]), None, None, None)
    w = low_bit.stack_of(w) if len(w.shape) == 2 else w
    data = w.data
    if data.dtype == jnp.uint8:
        data = lax.bitcast_convert_type(data, jnp.int8)
    if low_bit.has_groups(w) or sums_blocks:
        return Weights(data, w.scale, w.zero, w.row)
    return Weights(data, None, None, w.scale[:, 0])


def _groups(w: jax.Array | Quantized, sums_blocks: bool) -> Groups | None:
    if not isinstance(w, Quantized) or not (low_bit.has_groups(w) or sums_blocks):
        return None
    info, operands = FORMATS[w.format], skinny_operands.of(w)
    num_bytes = w.scale.dtype.itemsize + (w.zero is not None)
    if not low_bit.has_groups(w):
        return Groups(w.format, operands.step, 1, PART, num_bytes, is_row=True)
    size = info.block_in(w.shape[-1])
    return Groups(w.format, size, operands.step // size, PART // info.rows, num_bytes)


def _plan(
    num_blocks: int, num_rows: int, w: jax.Array | Quantized, is_gated: bool,
    least_blocks: int | None = None, sums_blocks: bool = False,
) -> Plan:  # fmt: skip
    """The shares by which blocks have the fewest steps, where there are at least `least_blocks`
    (None: `num_blocks`). They are the matrix's alone, since the order of sums must not depend on
    the number of rows.
    """
    *_, F, D = w.shape
    steps, cores = D // skinny_operands.of(w).step, target_device().num_cores

    def rounds(num_blocks: int, shares: int, features: int) -> int:
        clusters = max(1, cores // shares * _BLOCKS_A_CORE)
        return -(-num_blocks * F // (features * clusters))

    def steps_of_block(shares: int) -> int:
        steps_of_tile = -(-steps // shares) + _STEPS_OF_SUM * (shares > 1)
        return rounds(least_blocks or num_blocks, shares, 2 * PART) * steps_of_tile

    shares = min((shares for shares in _SHARES if shares <= steps), key=steps_of_block)
    tiles = _tiles(num_rows, w)
    num_tiles = F // (PART * tiles)
    clusters = -(-num_blocks * num_tiles // rounds(num_blocks, shares, PART * tiles))
    stages = _stages(num_rows, tiles, w, is_gated, sums_blocks)
    return Plan(
        num_blocks, F, num_tiles, steps, _columns(num_rows), tiles, stages, shares, clusters,
        is_gated, sums_blocks,
    )  # fmt: skip


def _fits(num_rows: int, w: jax.Array | Quantized, sums_blocks: bool) -> bool:
    """Whether registers and shared memory have room for the rows; a gate takes less."""
    stages = _stages(num_rows, _tiles(num_rows, w), w, False, sums_blocks)
    return _columns(num_rows) <= _most_rows(w, sums_blocks) and stages >= 2


def _most_rows(w: jax.Array | Quantized, sums_blocks: bool) -> int:
    """The most rows for which the compiler spills no registers."""
    operands, groups = skinny_operands.of(w), _groups(w, sums_blocks)
    if groups is None:
        return _MOST_ROWS
    if len(operands.planes) > 1:
        return {32: 8, 64: 16}.get(groups.size, 32)
    return _MOST_ROWS if groups.size >= PART else 48


def _columns(num_rows: int) -> int:
    return -(-num_rows // _ROW_TILE) * _ROW_TILE


def _tiles(num_rows: int, w: jax.Array | Quantized) -> int:
    """Tiles of a block: two, or one where two take too many registers."""
    operands, groups, columns = skinny_operands.of(w), _groups(w, False), _columns(num_rows)
    if w.shape[-2] // PART % 2 or len(operands.planes) > 1:
        return 1
    if groups is None or groups.size == operands.step:
        return 2
    return 2 if columns <= (32 if groups.size >= PART else 16) else 1


def _stages(
    num_rows: int, tiles: int, w: jax.Array | Quantized, is_gated: bool, sums_blocks: bool
) -> int:
    """Steps that fit into a block's shared memory, of half a multiprocessor if two do."""
    operands, columns, groups = skinny_operands.of(w), _columns(num_rows), _groups(w, sums_blocks)
    stage_bytes = tiles * PART * operands.row_bytes + columns * operands.step * 2
    if groups is not None:
        stage_bytes += max(ROW_BYTES, tiles * groups.of_step * PART * groups.num_bytes)
    fixed_bytes = (1 if is_gated else tiles) * PART * columns * 4 + (2 << 10)  # of float32
    blocks = _BLOCKS_A_CORE
    if 2 * stage_bytes + fixed_bytes > _SHARED_BYTES // blocks:
        blocks = 1
    return min(_MOST_STAGES, (_SHARED_BYTES // blocks - fixed_bytes) // stage_bytes)


def _scratch(block: Block, weights: Weights) -> dict[str, Any]:
    """A block's shared memory: arrays and barriers of all stages, and what leaves."""
    plan, operands, groups = block.plan, block.operands, block.groups
    stages, tiles, data_type = plan.stages, plan.tiles, weights.data.dtype
    buffers: dict[str, pl.MemoryRef] = {
        f"plane{n}": plgpu.SMEM(
            (stages, tiles, PART, plane.size), data_type, transforms=_swizzled(data_type, ROW_BYTES)
        )
        for n, plane in enumerate(operands.planes)
    }  # fmt: skip
    if groups is not None and weights.scale is not None:
        # A copy begins at a multiple of 128 bytes.
        width = max(groups.scales, ROW_BYTES // weights.scale.dtype.itemsize // groups.of_step)
        shape = stages, tiles, groups.of_step, width
        buffers["scale"] = plgpu.SMEM(shape, weights.scale.dtype)
        if weights.zero is not None:
            buffers["zero"] = plgpu.SMEM((stages, tiles, groups.of_step, PART), weights.zero.dtype)
    num_copies = len(buffers) * tiles
    # A group's columns are whole tiles.
    row_bytes = 2 * min(PART, operands.step if groups is None else groups.size)
    buffers["x"] = plgpu.SMEM(
        (stages, plan.columns, operands.step), jnp.bfloat16,
        transforms=_swizzled(jnp.bfloat16, row_bytes),
    )  # fmt: skip
    out_tiles = 1 if plan.is_gated else tiles
    return dict(
        buffers=buffers,
        out_smem=plgpu.SMEM((out_tiles, plan.columns, PART), block.dtype),
        weights_arrived=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        x_arrived=plgpu.Barrier(num_barriers=stages),
    )


def _swizzled(
    dtype: jax.typing.DTypeLike, row_bytes: int
) -> tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...]:
    """Tiles of 8 rows with swizzled 16-byte parts, as wgmma and its operands are read."""
    tile = 8, row_bytes // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform(tile), plgpu.SwizzleTransform(row_bytes)
