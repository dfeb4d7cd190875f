"""Single rows of memory as a tile of the tensor core, on Hopper GPUs (Pallas, Mosaic GPU).

Hopper's copy engine (TMA) moves boxes of neighboring rows. Rows that a query chooses lie anywhere,
so the threads of a warpgroup copy them, 16 bytes each (PTX's `cp.async`), past the registers and
into the places that wgmma expects. Eight threads copy 128 neighboring bytes of a row.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from layers.kernels.attention import hopper
from layers.kernels.attention.hopper import ROWS

_SIDE = 8  # rows of a block of a tile, which has 128 bytes of each
_COPY_BYTES, _BLOCK_BYTES = 16, 128
_PASS_ROWS = 128 // _SIDE  # that the threads of a warpgroup copy at a time


def start(ids_ref: Any, sources: tuple[Any, ...], target: Any, interpret: object) -> None:
    """Starts to copy the rows that 64 ids name, one group of copies for `wait`.

    Args:
        ids_ref: i32[64] in global memory: rows of the first source, or ~row of the second.
        sources: matrices [rows, H] of one type of 16 bits in global memory, H a multiple of 64.
        target: [64, H] in shared memory, with `hopper.operand_layout`.
    """
    if interpret:
        ids = ids_ref[...]
        rows = [source[...][jnp.where(ids < 0, ~ids, ids)] for source in sources]
        target[...] = jnp.where((ids < 0)[:, None], rows[-1], rows[0])
        return
    plain, tiled = plgpu.RefType(), plgpu.RefType(hopper.operand_layout(target.dtype))
    arguments = plain, (plain,) * len(sources), tiled
    plgpu.inline_mgpu(arg_types=arguments)(_copy)(ids_ref, sources, target)


def wait(later: int, interpret: object) -> None:
    """Waits until the rows have arrived, except for those of so many later groups. The tensor
    core may read them after a barrier of all threads that copy.
    """
    if not interpret:
        plgpu.inline_mgpu()(functools.partial(_wait, later))()
    plgpu.commit_smem()


def _copy(context: Any, ids: Any, sources: tuple[Any, ...], target: Any) -> None:
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    constant = utils.c
    num_blocks = ir.MemRefType(target.type).shape[1]
    thread = arith.remui(utils.thread_idx(), constant(128, i32))
    row = arith.divui(thread, constant(_SIDE, i32))
    column = arith.remui(thread, constant(_SIDE, i32))
    inner_row = arith.remui(row, constant(_SIDE, i32))
    # A tile's rows have their parts of 16 bytes in an order of their own (`SwizzleTransform`).
    place = arith.muli(inner_row, constant(_BLOCK_BYTES, i32))
    swizzled = arith.muli(arith.xori(column, inner_row), constant(_COPY_BYTES, i32))
    outer_row = arith.divui(row, constant(_SIDE, i32))
    outer = arith.muli(outer_row, constant(num_blocks * _SIDE * _BLOCK_BYTES, i32))
    address = llvm.ptrtoint(i32, utils.memref_ptr(target))
    address = arith.addi(address, arith.addi(outer, arith.addi(place, swizzled)))
    (stride, _), _ = ir.MemRefType(sources[0].type).get_strides_and_offset()
    bases = [llvm.ptrtoint(i64, utils.memref_ptr(source)) for source in sources]
    offset = arith.extui(i64, arith.muli(column, constant(_COPY_BYTES, i32)))
    for first in range(0, ROWS, _PASS_ROWS):
        nth = arith.addi(row, constant(first, i32))
        source_row = memref.load(ids, [arith.index_castui(ir.IndexType.get(), nth)])
        base = bases[0]
        if len(bases) > 1:
            sign = arith.shrsi(source_row, constant(31, i32))
            is_second = arith.cmpi(arith.CmpIPredicate.ne, sign, constant(0, i32))
            source_row = arith.xori(source_row, sign)
            base = arith.select(is_second, bases[1], base)
        start = arith.muli(arith.extsi(i64, source_row), constant(2 * stride, i64))
        source = arith.addi(base, arith.addi(start, offset))
        below = first // _SIDE * num_blocks * _SIDE * _BLOCK_BYTES
        copies = "".join(
            f"cp.async.cg.shared.global [$0 + {below + block * _SIDE * _BLOCK_BYTES}], "
            f"[$1 + {block * _BLOCK_BYTES}], {_COPY_BYTES};\n"
            for block in range(num_blocks)
        )
        _ptx(copies, [address, source], "r,l")
    _ptx("cp.async.commit_group;", [], "")


def _wait(later: int, context: Any) -> None:
    _ptx(f"cp.async.wait_group {later};", [], "")


def _ptx(text: str, operands: list[Any], constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(
        void, operands, text, f"{constraints},~{{memory}}".lstrip(","), has_side_effects=True
    )
