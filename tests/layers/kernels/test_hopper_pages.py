"""Bytes of quantized pages on their way into the tensor core of a Hopper GPU: which register of
which thread they reach, and the instructions that make numbers of them, computed here.
"""

import itertools
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from configs.cache import keys_values
from layers.kernels.attention import gpu, hopper_pages
from layers.kernels.attention.hopper_pages import GROUP, VALUES, WORDS
from layers.ragged import Ragged, Rectangle

pytestmark = pytest.mark.quick_code

_MASK = (1 << 32) - 1


def _places(layout, shape) -> dict:
    """Of each element of an array its thread, its register's index, and its place in that."""
    tiled, rank = layout.tiling, layout.tiled_tiling_rank
    places = {}
    for index in itertools.product(*map(range, shape)):
        at = list(tiled.tile_indices(index))
        sizes = dict(zip(range(-rank, 0), layout.tiled_tiling_shape, strict=True))
        warp = lane = 0
        for dim in layout.warp_dims:
            warp = warp * sizes[dim] + at[dim]
        for dim in layout.lane_dims:
            lane = lane * sizes[dim] + at[dim]
        nth = at[layout.vector_dim]
        for dim in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim):
            at[dim] = 0
        places[index] = (warp, lane), tuple(at), nth
    return places


def _operand(words_SX, pairs, layout, shape) -> np.ndarray:
    """What threads make of words, without a conversion: the bytes of an operand."""
    registers: dict = {}
    for index, (thread, at, nth) in _places(layout, words_SX.shape).items():
        registers.setdefault((thread, at), {})[nth] = int(words_SX[index])
    operand = np.full(shape, -1)
    targets = _places(mgpu.WGMMA_LAYOUT, shape)
    found = {(thread, at, nth): index for index, (thread, at, nth) in targets.items()}
    for thread in {thread for thread, *_ in targets.values()}:
        for at, *sources in pairs:
            for nth, (source, byte) in enumerate(sources):
                word = registers[thread, source][byte // 2]
                operand[found[thread, at, nth]] = word >> 8 * (byte % 2) & 255
    return operand


def _packed(num_groups: float) -> tuple[np.ndarray, np.ndarray]:
    """Random rows of a page of so many groups of keys, and of values, and their words."""
    width = int(2 * num_groups * (GROUP + 2))
    row_TX = np.random.default_rng(0).integers(0, 256, (GROUP, width), np.uint8)
    return row_TX, np.asarray(hopper_pages.pack(jnp.asarray(row_TX)))


@pytest.mark.parametrize("group", [0, 2])
def test_threads_get_the_elements_of_their_fragments(group):
    """Of keys [tokens, elements] and of values [elements, tokens]."""
    row_TX, words_TX = _packed(3)
    for number, pairs, layout in (
        (group, hopper_pages.key_pairs(GROUP), mgpu.WGMMA_LAYOUT),
        (3 + group, hopper_pages.value_pairs(GROUP), VALUES),
    ):
        words_SX = words_TX[:, number * WORDS : (number + 1) * WORDS]
        found = _operand(words_SX, pairs, layout, (GROUP, GROUP))
        elements_SX = row_TX[:, number * GROUP : (number + 1) * GROUP]
        expected = elements_SX if layout is mgpu.WGMMA_LAYOUT else elements_SX.T
        np.testing.assert_array_equal(found, expected)


def test_the_transpose_of_a_result_is_where_it_was():
    """The same thread has an element in both layouts, which `transposed` takes for granted."""
    transposes = _places(hopper_pages.TRANSPOSED, (16, 128))
    of_latents = _places(hopper_pages.OF_LATENTS, (16, 128))
    row_TX, words_TX = _packed(1.5)  # a latent, in whose value's operand rows are out of order
    operand = _operand(words_TX[:, :WORDS], hopper_pages.value_pairs(GROUP), VALUES, (64, 64))
    rows = {tuple(row): s for s, row in enumerate(row_TX[:, :GROUP].T)}
    for (s, u), (thread, at, nth) in _places(mgpu.WGMMA_LAYOUT, (128, 16)).items():
        tile, eight, _, _, half, *_ = at
        assert transposes[u, s] == (thread, (eight, tile, 0, 0, nth, half, 0, 0), 0)
        element = s - s % GROUP + rows[tuple(operand[s % GROUP])]
        assert of_latents[u, element] == (thread, (eight, tile, 0, 0, nth, 0, 0, 0), half)


def test_threads_get_the_elements_of_a_latent():
    row_TX, words_TX = _packed(4.5)
    for group in (0, 8):
        words_SX = words_TX[:, group * WORDS : (group + 1) * WORDS]
        pairs, layout = hopper_pages.key_pairs(GROUP), mgpu.WGMMA_LAYOUT
        operand = _operand(words_SX, pairs, layout, (GROUP, GROUP))
        np.testing.assert_array_equal(operand, row_TX[:, group * GROUP : (group + 1) * GROUP])
    scales_TX = row_TX[:, 9 * GROUP :].copy().view(np.uint16)
    np.testing.assert_array_equal(words_TX[:, 9 * WORDS :][:, :9], scales_TX)


def test_scales_of_a_group_lie_together():
    row_TX, words_TX = _packed(3)
    scales_TX = row_TX[:, 6 * GROUP :].copy().view(np.uint16)
    for group in range(3):
        first = 6 * WORDS + 2 * group
        np.testing.assert_array_equal(words_TX[:, first], scales_TX[:, group])
        np.testing.assert_array_equal(words_TX[:, first + 1], scales_TX[:, 3 + group])


@pytest.mark.parametrize("format", hopper_pages.FORMATS)
@pytest.mark.parametrize("bytes_from", [(0, 1), (2, 3), (1, 1), (0, 0)])
def test_instructions_make_the_number_of_every_byte(format, bytes_from):
    low, high = bytes_from
    program = hopper_pages.pair_program(format, low, high)
    dtype = ml_dtypes.float8_e4m3fn if format == "fp8" else np.int8
    for byte in range(256):
        if format == "fp8" and byte & 127 == 127:  # NaN, which no page has
            continue
        other = byte * 7 + 3 & 255
        if format == "fp8" and other & 127 == 127:
            other = 0
        result = _run(program, byte << 8 * low, other << 8 * high)
        pair = np.array([result], np.uint32).view(ml_dtypes.bfloat16)
        expected = np.array([byte, other], np.uint8).view(dtype)
        np.testing.assert_array_equal(np.float32(pair), expected.astype(np.float32))


def _run(program: str, first: int, second: int) -> int:
    """What the instructions leave in $0."""
    registers = {"$1": first, "$2": second}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in filter(None, map(str.strip, program.split(";"))):
        name, target, *rest = re.split(r"[ ,]+", line)
        operation, operands = name.split(".")[0], [value(each) for each in rest]
        registers[target] = _OPERATIONS[operation](*operands) & _MASK
    return registers["$0"]


def _permute(x: int, y: int, select: int) -> int:
    result = 0
    for nth in range(4):
        choice = select >> 4 * nth & 15
        byte = (x | y << 32) >> 8 * (choice & 7) & 255
        result |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * nth
    return result


def _lookup(x: int, y: int, z: int, table: int) -> int:
    bits = ((x >> n & 1) << 2 | (y >> n & 1) << 1 | z >> n & 1 for n in range(32))
    return sum((table >> bit & 1) << n for n, bit in enumerate(bits))


def _of_halves(compute):
    def run(x: int, y: int) -> int:
        x_2, y_2 = (np.array([z], np.uint32).view(ml_dtypes.bfloat16) for z in (x, y))
        exact = compute(np.float64(x_2), np.float64(y_2))
        return int(exact.astype(ml_dtypes.bfloat16).view(np.uint32)[0])

    return run


_OPERATIONS = {
    "mov": lambda x: x,
    "and": lambda x, y: x & y,
    "shl": lambda x, n: x << n,
    "prmt": _permute,
    "lop3": _lookup,
    "mul": _of_halves(np.multiply),
    "sub": _of_halves(np.subtract),
}


def test_a_step_writes_words_in_place():
    """Into the pages that the kernel lays out; padding into page 0."""
    page_format = keys_values(3, 64).page_format("int8")
    pages = gpu.layout(5, 4, page_format)
    assert pages.shape[2] == page_format.padded_width(hopper_pages.ROW_BYTES) // 2
    row_TX, words_TX = _packed(3)
    position_12, valid_12 = jnp.array([[5, 6]]), jnp.array([[True, False]])
    rectangle = Rectangle(jnp.zeros(1, int), position_12, valid_12, (jnp.array([[2, 4]]),))
    zeros = jnp.zeros(pages.shape, pages.dtype)
    after = gpu.write(zeros, jnp.asarray(row_TX[:2]), Ragged((rectangle,)), 0)
    np.testing.assert_array_equal(after[4, 1], words_TX[0])
    assert not np.asarray(after[1:].at[3, 1].set(0)).any()
