"""How Hopper's products of few rows read a stored matrix: parts of 64 rows and 64 columns, as
bfloat16 operands of the tensor core.

Formats of eight bits are converted from the bytes of two neighbors. Fewer bits lie in words of 16
(`low_bit.py`), whose elements are 64 apart: a register has the same bits of two neighbors, so a
shift, a mask and a subtraction make two numbers. bfloat16 itself stays in shared memory.

The integer n of up to seven bits behind bfloat16's 0x4300 is 128 + n. A float of few bits in the
place of bfloat16's own is that float times a power of two, subnormals included.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from configs.precision import FORMATS
from layers import quantized
from layers.kernels.linear import low_bit
from layers.kernels.linear.low_bit import Quantized

PART = 64  # rows and columns
ROW_BYTES = 128  # of a box, at least
_WORD = 16  # bits
_INTEGERS = 128  # what bfloat16's bits 0x4300 are, and the last that counts integers after it
_E4M3, _E2M1 = 2.0**120, 2.0**126  # what their biases lack of bfloat16's


Boxes = Sequence[jax.Array]  # of each plane, the 128 bytes of rows that have some columns' bits


class Plane(NamedTuple):
    """Bits of a row that lie together.

    Attributes:
        first: element of the row's data where they begin.
        size: elements of the data that a step reads.
        columns: of the matrix, of which 128 bytes have bits.
    """

    first: int
    size: int
    columns: int


class Operands(NamedTuple):
    """A stored matrix [F, D] in steps along D.

    Attributes:
        step: columns of D.
        row_bytes: bytes of a row that a step reads.
        planes: where these bytes lie in the row.
        part: (planes' boxes, and which 64 columns of a step) -> bfloat16 [64, 64]; None: the data
            is the operand.
        bias: of what `part` returns, to be subtracted with a group's zero point.
    """

    step: int
    row_bytes: int
    planes: tuple[Plane, ...]
    part: Callable[[Boxes, int, object], jax.Array] | None
    bias: int = 0


def of(w: jax.Array | Quantized) -> Operands:
    """How (a matrix of) w is read; with zero points the bias stays."""
    if not isinstance(w, Quantized):
        return Operands(PART, ROW_BYTES, (Plane(0, PART, PART),), None)
    format, width, has_zeros = w.format, w.shape[-1], w.zero is not None
    bits = low_bit.planes(format)
    if bits == (8,):
        of_bytes = _of_e4m3 if "fp8" in format else _of_int8
        return Operands(ROW_BYTES, ROW_BYTES, (Plane(0, ROW_BYTES, ROW_BYTES),), of_bytes)
    step, planes, shift = PART * _WORD // min(bits), [], 0
    for plane_bits in bits:
        first, size = width * shift // _WORD, step * plane_bits // _WORD
        planes.append(Plane(first, size, PART * _WORD // plane_bits))
        shift += plane_bits
    row_bytes = step * FORMATS[format].bits // 8
    if quantized.is_e2m1(format):
        return Operands(step, row_bytes, tuple(planes), _of_e2m1)
    bias = _INTEGERS if has_zeros else 0
    middle = 0 if has_zeros else 1 << FORMATS[format].bits - 1

    def part(boxes: Boxes, index: int, interpret: object) -> jax.Array:
        shifts = [index % (_WORD // n) * n for n in bits]
        return _of_integers(boxes, bits, shifts, middle, bias > 0, interpret)

    return Operands(step, row_bytes, tuple(planes), part, bias)


def _of_integers(
    words: Sequence[jax.Array], bits: Sequence[int], shifts: Sequence[int], middle: int,
    is_biased: bool, interpret: object,
) -> jax.Array:  # fmt: skip
    """Integers of planes, less the middle; or with 128 added."""
    if interpret:
        number, low = jnp.zeros((), jnp.int32), 0
        for word, plane_bits, shift in zip(words, bits, shifts, strict=True):
            plane = (word.astype(jnp.int32) >> shift) & (1 << plane_bits) - 1
            number, low = number | plane << low, low + plane_bits
        return (number + (_INTEGERS if is_biased else -middle)).astype(jnp.bfloat16)
    lines, low, sum_register = [], 0, None
    for n, (plane_bits, shift) in enumerate(zip(bits, shifts, strict=True)):
        mask = (1 << plane_bits) - 1 << low
        lines.append(_shifted(f"t{n}", f"${n + 1}", shift - low))
        other = sum_register or _pair(0x4300)
        lines.append(f"lop3.b32 u{n}, t{n}, {_pair(mask)}, {other}, 0xEA;")  # (a & b) | c
        low, sum_register = low + plane_bits, f"u{n}"
    if is_biased:
        lines.append(f"mov.b32 $0, {sum_register};")
    else:
        lines.append(f"mov.b32 m, {_pair(0x4300 | middle)};")
        lines.append(f"sub.bf16x2 $0, {sum_register}, m;")
    return _inline(words, lines)


def _of_e2m1(boxes: Boxes, index: int, interpret: object) -> jax.Array:
    (word,), shift = boxes, 4 * index
    if interpret:
        return low_bit.of_e2m1((word.astype(jnp.int32) >> shift) & 15).astype(jnp.bfloat16)
    return _inline([word], [
        _shifted("t0", "$1", shift - 6), f"and.b32 u0, t0, {_pair(0x01C0)};",
        _shifted("t1", "$1", shift - 12), f"lop3.b32 u1, t1, {_pair(0x8000)}, u0, 0xEA;",
        f"mov.b32 m, {_pair(_bits(_E2M1))};", "mul.bf16x2 $0, u1, m;",
    ])  # fmt: skip


def _of_int8(boxes: Boxes, index: int, interpret: object) -> jax.Array:
    """128 and seven bits, less 128 or, where the eighth is set, 256."""
    number = _columns(boxes, index)
    if interpret:
        return number.astype(jnp.bfloat16)
    return _inline([number], [
        "prmt.b32 t0, $1, 0, 0x4140;",  # a byte in the lower half of each word
        f"lop3.b32 u0, t0, {_pair(0x007F)}, {_pair(0x4300)}, 0xEA;",
        f"lop3.b32 u1, t0, {_pair(0x0080)}, {_pair(0x4300)}, 0xEA;",
        "sub.bf16x2 $0, u0, u1;",
    ])  # fmt: skip


def _of_e4m3(boxes: Boxes, index: int, interpret: object) -> jax.Array:
    number = _columns(boxes, index)
    if interpret:
        return jax.lax.bitcast_convert_type(number, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    return _inline([number], [
        "prmt.b32 t0, $1, 0, 0x1404;",  # a byte in the upper half of each word
        "shr.u32 t1, t0, 4;", f"and.b32 u0, t1, {_pair(0x07F0)};",
        f"lop3.b32 u1, t0, {_pair(0x8000)}, u0, 0xEA;",
        f"mov.b32 m, {_pair(_bits(_E4M3))};", "mul.bf16x2 $0, u1, m;",
    ])  # fmt: skip


def _columns(boxes: Boxes, index: int) -> jax.Array:
    """The bytes of 64 columns of a step."""
    return boxes[0][:, index * PART : (index + 1) * PART]


def _pair(half: int) -> str:
    return f"0x{half << 16 | half:08X}"


def _bits(number: float) -> int:
    return int(np.asarray(number, jnp.bfloat16).view(np.uint16))


def _shifted(target: str, source: str, right: int) -> str:
    """A shift by so many bits to the right, or to the left."""
    if right == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shr.u32' if right > 0 else 'shl.b32'} {target}, {source}, {abs(right)};"


def _inline(arrays: Sequence[jax.Array], lines: Sequence[str]) -> jax.Array:
    """A register of two bfloat16, $0, of one of each array's pairs, $1, $2, ..., by PTX."""
    layout = plgpu.Layout.WGMMA
    shape = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.bfloat16, layout=layout)
    asm = f"{{ .reg .b32 t0, t1, u0, u1, m; {' '.join(lines)} }}"

    @plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=shape)
    def converted(_, *fragments):
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty_like(fragments[0].registers)
        for at in np.ndindex(registers.shape):
            inputs = [_as_i32(fragment.registers[at], i32) for fragment in fragments]
            output: Any = llvm.inline_asm(i32, inputs, asm, ",".join(["=r"] + ["r"] * len(inputs)))
            registers[at] = mgpu.utils.bitcast(output, pair)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=fragments[0].layout, _is_signed=None
        )

    return converted(*arrays)


def _as_i32(register: Any, i32: ir.Type) -> Any:
    """Two elements in the lower bits."""
    if mgpu.utils.bitwidth(register.type) == 32:
        return mgpu.utils.bitcast(register, i32)
    i16 = ir.IntegerType.get_signless(16)
    return llvm.zext(i32, mgpu.utils.bitcast(register, i16))
