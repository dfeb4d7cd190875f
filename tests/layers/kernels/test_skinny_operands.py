"""The PTX that makes stored bits bfloat16, run by a machine of its few instructions, and numpy."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.linear import low_bit, skinny_operands


def _run(lines, *inputs):
    """What PTX leaves in $0, of uint32 arrays in $1, $2, ..."""
    registers = {f"${n + 1}": register.astype(np.uint64) for n, register in enumerate(inputs)}

    def value(name):
        return registers[name] if name in registers else np.uint64(int(name, 0))

    for line in lines:
        name, target, *sources = re.findall(r"[\w.$]+", line.partition(";")[0])
        first, *more = map(value, sources)
        registers[target] = _INSTRUCTIONS[name](first, *more) & np.uint64(0xFFFFFFFF)
    return registers["$0"].astype(np.uint32)


def _permuted(a, b, selector):
    both = a | b << np.uint64(32)
    picks = [int(selector) >> 4 * n & 7 for n in range(4)]
    return sum((both >> np.uint64(8 * pick) & np.uint64(255)) << np.uint64(8 * n)
               for n, pick in enumerate(picks))  # fmt: skip


def _of_pairs(operation):
    """On two bfloat16 of a register, rounded once."""

    def run(a, b):
        halves = [
            operation(*(_bfloat16(register >> np.uint64(16 * n)) for register in (a, b)))
            for n in range(2)
        ]
        low, high = (np.asarray(half, jnp.bfloat16).view(np.uint16).astype(np.uint64)
                     for half in halves)  # fmt: skip
        return low | high << np.uint64(16)

    return run


def _bfloat16(bits):
    half = (np.asarray(bits) & np.uint64(0xFFFF)).astype(np.uint16)
    return half.view(jnp.bfloat16).astype(np.float64)


_INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[int(table)],
    "prmt.b32": _permuted,
    "sub.bf16x2": _of_pairs(np.subtract),
    "mul.bf16x2": _of_pairs(np.multiply),
}


@pytest.fixture
def numbers(monkeypatch):
    """What a format makes of boxes of registers' pairs, for 64 columns: float64 [.., 2]."""

    def inline(arrays, lines):
        register = _run(lines, *(np.asarray(array) for array in arrays))
        return np.stack([_bfloat16(register), _bfloat16(register >> np.uint32(16))], -1)

    monkeypatch.setattr(skinny_operands, "_inline", inline)
    monkeypatch.setattr(skinny_operands, "_columns", lambda boxes, index: boxes[0])

    def of(format, boxes, index):
        w = low_bit.abstract((64, 1024), format, "bfloat16", np.uint16)
        operands = skinny_operands.of(w)
        return operands.part(boxes, index, None) - operands.bias

    return of


_BYTES = np.arange(256, dtype=np.uint32)
_PAIRS = _BYTES | _BYTES[::-1] << 8  # of bytes, in the lower half of a register


@pytest.mark.parametrize("format, dtype", [("int8", np.int8), ("fp8", jnp.float8_e4m3fn)])
def test_bytes_become_their_numbers(format, dtype, numbers):
    found = numbers(format, [_PAIRS], 0)
    expected = np.stack([_BYTES, _BYTES[::-1]], -1).astype(np.uint8).view(dtype)
    expected = expected.astype(np.float64)
    is_number = np.isfinite(expected)
    np.testing.assert_array_equal(found[is_number], expected[is_number])


@pytest.mark.parametrize("format", ["int4", "int4_asym", "int3", "int3_asym", "mxfp4"])
def test_bits_of_words_become_their_numbers(format, numbers):
    """Whatever else the words have."""
    random = np.random.default_rng(0)
    planes = low_bit.planes(format)
    boxes = [random.integers(0, 1 << 32, 4096, np.uint32) for _ in planes]
    for index in range(16 // min(planes)):
        number, shift = np.zeros((4096, 2), np.int64), 0
        for box, bits in zip(boxes, planes, strict=True):
            word = np.stack([box & 0xFFFF, box >> 16], -1).astype(np.int64)
            number |= (word >> index % (16 // bits) * bits & (1 << bits) - 1) << shift
            shift += bits
        if format == "mxfp4":
            expected = np.asarray(low_bit.of_e2m1(jnp.asarray(number)))
        else:
            expected = number - (0 if "asym" in format else 1 << shift - 1)
        np.testing.assert_array_equal(numbers(format, boxes, index), expected)
