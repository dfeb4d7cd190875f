"""Quantized pages on Hopper GPUs: how a token's bytes lie in them, and how these become operands of
the tensor core (wgmma) in registers.

A row of a page is 16-bit words: the elements of all keys, those of all values, and bfloat16 scales,
a group's of keys beside that of values; or the elements of a latent, and their scales. Bytes lie in
the order in which threads read them. Both keys and values are a product's first operand, of which a
thread has two rows of 16 and four columns of 16. Those of a key lie side by side. A value's operand
is transposed: its two rows are elements of one token, which lie side by side. Of a latent, which is
both, two neighbors do, and the result's columns are named accordingly.

An int8 or fp8 (e4m3) is a bfloat16, exactly. Scales never meet an element.

S counts tokens, U query rows.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

FORMATS = ("int8", "fp8")
GROUP = 64  # elements that share a scale
WORDS = GROUP // 2  # of a group
ROW_BYTES = 128  # of which a row is a multiple: whole parts that the copy engine shuffles
BOX_SCALES = 8  # that are copied at once, 16 bytes
_GROUP_BYTES = 2 * (GROUP + 2)  # of a key's and a value's, with their scales

# Of words [S, 32]: of four threads each has every fourth pair of rows.
VALUES = mgpu.TiledLayout(Tiling(((8, 32), (2, 8), (1,))), (-4,), (-2, -5), -1)
# Of the transpose of a product's result, which has `WGMMA_LAYOUT`; where its rows are elements of a
# latent, two of a thread are neighbors.
TRANSPOSED = mgpu.TiledLayout(Tiling(((8, 64), (2, 16), (8,), (1,))), (-5,), (-2, -6), -1)
OF_LATENTS = mgpu.TiledLayout(Tiling(((8, 64), (2, 16), (8,), (2,))), (-5,), (-2, -3, -6), -1)


def words(stored_width: int) -> int:
    """16-bit words of a row, of as many bytes without padding."""
    return -(-stored_width // ROW_BYTES) * ROW_BYTES // 2


def pack(row_TX: jax.Array) -> jax.Array:
    """Rows of `page_rows.quantize`, uint8 [T, stored width], as uint16 [T, words]. An odd number of
    groups is a latent's.
    """
    T, width = row_TX.shape
    if width % _GROUP_BYTES:
        num_elements = GROUP * (2 * width // _GROUP_BYTES)
        keys, scales = jnp.split(row_TX, (num_elements,), axis=1)
        parts = [_neighbors(keys), scales]
    else:
        num_elements = GROUP * (width // _GROUP_BYTES)
        keys, values, scales = jnp.split(row_TX, (num_elements, 2 * num_elements), axis=1)
        values = values.reshape(T, -1, 4, 2, 8).swapaxes(3, 4)
        parts = [_neighbors(keys), values, scales.reshape(T, 2, -1, 2).swapaxes(1, 2)]
    parts.append(jnp.zeros((T, 2 * words(width) - width), jnp.uint8))
    bytes_TX = jnp.concatenate([part.reshape(T, -1) for part in parts], axis=1)
    return lax.bitcast_convert_type(bytes_TX.reshape(T, -1, 2), jnp.uint16)


def _neighbors(keys_TX: jax.Array) -> jax.Array:
    """Of 16 elements the four of each thread side by side."""
    return keys_TX.reshape(len(keys_TX), -1, 2, 4, 2).swapaxes(2, 3)


class Pair(NamedTuple):
    """Two neighbors of an operand's row, which are one register, and the bytes that they are of."""

    at: tuple[int, ...]  # index of the register
    low: tuple[tuple[int, ...], int]  # index of a register, and of its byte
    high: tuple[tuple[int, ...], int]


def key_pairs(num_tokens: int) -> list[Pair]:
    """Of keys [S, 64], from words [S, 32]; both have `WGMMA_LAYOUT`."""
    pairs = []
    for index in np.ndindex(mgpu.WGMMA_LAYOUT.registers_shape((num_tokens, WORDS))):
        tile, column, *inside = index
        for half in range(2):
            at = tile, 2 * column + half, *inside
            pairs.append(Pair(at, (index, 2 * half), (index, 2 * half + 1)))
    return pairs


def value_pairs(num_tokens: int) -> list[Pair]:
    """Of values [64, S], which have `WGMMA_LAYOUT`, from words [S, 32] of `VALUES`."""
    pairs = []
    for eight in range(num_tokens // 8):
        low, high = ((eight, 0, 0, 0, nth, 0, 0) for nth in range(2))
        for half in range(2):
            pairs.append(Pair((0, eight, 0, 0, half, 0, 0, 0, 0), (low, half), (high, half)))
    return pairs


def pair_program(format: str, low_byte: int, high_byte: int) -> str:
    """PTX of two bfloat16 ($0) of a byte of $1 and one of $2, from registers t and u.

    With the bits of e4m3 at the end of its exponent and the beginning of its mantissa, a bfloat16
    is 2^-120 of the number. With seven bits of an int8 in the mantissa of 128 it is these and 128,
    from which 128 is subtracted or, if the eighth is set, 256.
    """
    if format == "fp8":
        # Each byte with its sign before it.
        select = low_byte | (8 | low_byte) << 4 | (4 | high_byte) << 8 | (12 | high_byte) << 12
        return f"""
            prmt.b32 t, $1, $2, {select};
            shl.b32 t, t, 4;
            and.b32 t, t, 0x87f087f0;
            mov.b32 u, 0x7b807b80;
            mul.rn.bf16x2 $0, t, u;
        """
    select = 0x11 * (low_byte | (4 | high_byte) << 8)
    return f"""
        prmt.b32 t, $1, $2, {select};
        lop3.b32 u, t, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 t, t, 0x00800080, 0x43004300, 0xea;
        sub.rn.bf16x2 $0, u, t;
    """


def key_operand(words_SX: jax.Array, format: str, interpret: object) -> jax.Array:
    """Keys of a group, bfloat16 [S, 64], of uint16 [S, 32]."""
    S = len(words_SX)
    if interpret:
        bytes_SX = lax.bitcast_convert_type(words_SX, jnp.uint8).reshape(S, -1, 4, 2, 2)
        return _numbers(bytes_SX.swapaxes(2, 3).reshape(S, GROUP), format)
    convert = _converted(mgpu.WGMMA_LAYOUT, (S, GROUP), key_pairs(S), format)
    return convert(words_SX)


def value_operand(
    words_SX: jax.Array, format: str, of_latents: bool, interpret: object
) -> jax.Array:
    """Values of a group, transposed: bfloat16 [64, S], of uint16 [S, 32]. Of latents their rows are
    in the order in which `transposed` puts them right.
    """
    S = len(words_SX)
    if interpret:
        if of_latents:
            return key_operand(words_SX, format, interpret).T
        bytes_SX = lax.bitcast_convert_type(words_SX, jnp.uint8).reshape(S, 4, 8, 2)
        return _numbers(bytes_SX.swapaxes(2, 3).reshape(S, GROUP).T, format)
    return _converted(VALUES, (GROUP, S), value_pairs(S), format)(words_SX)


def _converted(
    layout: mgpu.TiledLayout, shape: tuple[int, int], pairs: list[Pair], format: str
) -> Any:
    """The function from words of a layout to an operand."""

    @plgpu.inline_mgpu(
        arg_types=(_named(layout),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def convert(_, stored):
        operand = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for at, *sources in pairs:
            values = [_as_i32(stored.registers[index]) for index, _ in sources]
            program = pair_program(format, *(byte for _, byte in sources))
            program = "{ .reg .b32 t, u; " + program + "}"
            i32 = ir.IntegerType.get_signless(32)
            pair = llvm.inline_asm(i32, values, program, "=r,r,r", asm_dialect=0)
            assert isinstance(pair, ir.Value)
            operand[at] = mgpu.utils.bitcast(pair, ir.VectorType.get((2,), ir.BF16Type.get()))
        return _fragments(operand, mgpu.WGMMA_LAYOUT)

    return convert


def column(scales_S1: Any, interpret: object) -> jax.Array:
    """Scales of a column of a box in shared memory, uint16 [S, 1]: float32 [S]. JAX's own load of
    what does not lie side by side has no layout from jax 0.11 on.
    """
    S = scales_S1.shape[0]
    if interpret:
        return lax.bitcast_convert_type(scales_S1[...][:, 0].astype(jnp.uint32) << 16, jnp.float32)
    layout = mgpu.WGMMA_ROW_LAYOUT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((S,), jnp.float32, plgpu.Layout.WGMMA.reduce(1)),
    )
    def load(_, stored):
        i32, constant = ir.IntegerType.get_signless(32), mgpu.utils.c
        thread = arith.remui(mgpu.utils.thread_idx(), constant(128, i32))
        warp, lane = (op(thread, constant(32, i32)) for op in (arith.divui, arith.remui))
        row = arith.addi(
            arith.muli(warp, constant(16, i32)), arith.divui(lane, constant(4, i32))
        )  # and the one 8 below, of every 64
        registers = np.empty(layout.registers_shape((S,)), object)
        for nth, index in enumerate(np.ndindex(registers.shape)):
            below = constant(nth // 2 * 64 + nth % 2 * 8, i32)
            at = arith.index_cast(ir.IndexType.get(), arith.addi(row, below))
            bits = arith.extui(i32, memref.load(stored, [at, constant(0, ir.IndexType.get())]))
            bits = arith.shli(bits, constant(16, i32))
            number = mgpu.utils.bitcast(bits, ir.F32Type.get())
            registers[index] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), number)
        return _fragments(registers, layout)

    return load(scales_S1)


def transposed(tiles_SU: list[jax.Array], of_latents: bool, interpret: object) -> jax.Array:
    """[U, S of all]: the transpose of products' results, of which threads keep what they have."""
    if interpret:
        return jnp.concatenate(tiles_SU).T
    S, U = tiles_SU[0].shape
    shape, layout = (U, S * len(tiles_SU)), OF_LATENTS if of_latents else TRANSPOSED

    @plgpu.inline_mgpu(
        arg_types=([plgpu.Layout.WGMMA] * len(tiles_SU),),
        return_type=plgpu.ShapeDtypeStruct(shape, tiles_SU[0].dtype, _named(layout)),
    )
    def relabel(_, tiles):
        registers = np.empty(layout.registers_shape(shape), object)
        for tile, x in enumerate(tiles):
            halves = x.registers.reshape(-1, 2)  # of eight queries, and rows 8 apart
            for eight, nth in itertools.product(range(U // 8), range(2)):
                row = [mgpu.utils.vector_slice(pair, slice(nth, nth + 1)) for pair in halves[eight]]
                if of_latents:
                    registers[eight, tile, 0, 0, nth, 0, 0, 0] = mgpu.utils.vector_concat(row)
                else:
                    registers[eight, tile, 0, 0, nth, :, 0, 0] = row
        return _fragments(registers, layout)

    return relabel(tiles_SU)


def _named(layout: mgpu.TiledLayout) -> Any:
    """A layout as Pallas takes it."""
    if layout == mgpu.WGMMA_LAYOUT:
        return plgpu.Layout.WGMMA
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _fragments(registers: np.ndarray, layout: mgpu.TiledLayout) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _as_i32(words: Any) -> Any:
    """One word or two as 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    if ir.VectorType(words.type).shape == [1]:
        return arith.extui(i32, vector.extract(words, [], [0]))
    return mgpu.utils.bitcast(words, i32)


def _numbers(bytes_SX: jax.Array, format: str) -> jax.Array:
    """What `pair_program` makes of bytes, where no threads are."""
    dtype = jnp.float8_e4m3fn if format == "fp8" else jnp.int8
    numbers_SX = lax.bitcast_convert_type(bytes_SX, dtype).astype(jnp.float32)
    return numbers_SX.astype(jnp.bfloat16)
