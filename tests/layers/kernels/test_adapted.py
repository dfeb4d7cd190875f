"""Products with adapters of rows, by the native library and by XLA, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import quantized, weights
from layers.backends.cpu import Cpu
from layers.kernels.cpu.rows import gate
from layers.kernels.linear import adapted_cpu, packed
from layers.kernels.linear.adapted import Adapted
from layers.linear import linear
from tests.layers.kernels.adapted_case import Case, drawn
from tests.layers.native import instruction_set, need, refused  # noqa: F401

_CASES = [  # rows, D, ends of modules
    (1, 64, (32,)), (7, 33, (5, 12, 40)), (150, 96, (8, 64, 100)),
]  # fmt: skip
_FORMATS = "int8", "w8a8", "w8a8_fp8", "fp8", "int4_g64", "mxfp4"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_added_to_a_dense_product(instruction_set, dtype):  # noqa: F811
    for T, D, ends in _CASES:
        case = Case.of(T, D, ends, dtype)
        w = packed.pack(drawn(9, ends[-1], D, dtype=dtype))
        base = np.asarray(jax.jit(linear)(case.x_TD, w))
        case.check(np.asarray(jax.jit(linear)(case.x_TD, case.leaf(w))), base, dtype)


@pytest.mark.parametrize("format", _FORMATS)
@pytest.mark.parametrize("exact", [False, True])
def test_adapters_are_added_to_products_with_blocks(format, exact):
    need()
    for T, D, ends in ((37, 256, (10, 70)),):
        case = Case.of(T, D, ends)
        w = _blocks(format, ends[-1], D)
        with packed.exact(exact):
            base = np.asarray(jax.jit(linear)(case.x_TD, w))
            found = np.asarray(jax.jit(linear)(case.x_TD, case.leaf(w)))
        case.check(found, base, "float32")


def _blocks(format, F, D):
    blocks = quantized.quantize(format, drawn(9, F, D))
    return packed.pack_rows(blocks.reshape(-1, blocks.shape[-1]), format, (F, D))


def test_adapters_are_added_to_parts_of_different_formats():
    need()
    case = Case.of(9, 64, (32, 48))
    parts = _blocks("int8", 32, 64), packed.pack(drawn(9, 16, 64))
    base = np.asarray(jax.jit(linear)(case.x_TD, parts))
    case.check(np.asarray(jax.jit(linear)(case.x_TD, case.leaf(parts))), base, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_adds_the_same(dtype):
    for T, D, ends in _CASES[1:2]:
        case = Case.of(T, D, ends, dtype)
        w = jnp.asarray(drawn(9, ends[-1], D, dtype=dtype))
        base = np.asarray(linear(case.x_TD, w))
        case.check(np.asarray(jax.jit(linear)(case.x_TD, case.leaf(w, packs=False))), base, dtype)


def test_one_adapter_of_all_rows_is_added_by_module():
    case = Case.of(6, 33, (5, 12, 40), slot_T=np.full(6, 2))
    w = jnp.asarray(drawn(9, 40, 33))
    leaf = Adapted(w, jnp.asarray(case.down[2]), jnp.asarray(case.up[2]), case.ends)
    base = np.asarray(linear(case.x_TD, w))
    case.check(np.asarray(weights.of(leaf).product(jnp.asarray(case.x_TD))), base, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_beside_any_rows_and_adapters(instruction_set, dtype):  # noqa: F811
    case = Case.of(150, 96, (20, 48, 100), dtype)
    _check_company(case, packed.pack(drawn(9, 100, 96, dtype=dtype)))


@pytest.mark.parametrize("format", _FORMATS)
def test_beside_blocks_a_row_has_the_same_bits_too(format):
    need()
    _check_company(Case.of(40, 64, (20, 48), "bfloat16"), _blocks(format, 48, 64))


def _check_company(case, w):
    rows_T = len(case.slot_T)
    whole = np.asarray(jax.jit(linear)(case.x_TD, case.leaf(w)))
    for rows in (slice(1), slice(-5, None), slice(rows_T // 2)):
        found = jax.jit(linear)(case.x_TD[rows], case.leaf(w, rows=rows))
        np.testing.assert_array_equal(found, whole[rows])
    for slot in range(len(case.ranks_N)):
        alone = dataclasses.replace(case, slot_T=np.full(rows_T, slot))
        found = np.asarray(jax.jit(linear)(case.x_TD, alone.leaf(w)))
        chosen = case.slot_T == slot
        np.testing.assert_array_equal(found[chosen], whole[chosen])


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
def test_a_gated_product_has_the_bits_of_its_two_steps(instruction_set, format):  # noqa: F811
    backend = Cpu()
    for T, D, F in ((7, 64, 352), (150, 64, 96)):
        case = Case.of(T, D, (F // 2, F), "bfloat16")
        w = packed.pack(drawn(9, F, D, dtype=format)) if format == "bfloat16" else None
        leaf = case.leaf(w or _blocks(format, F, D))
        apart_TF = gate(linear(jnp.asarray(case.x_TD), leaf), "silu", "bfloat16")
        found_TF = backend.gated_product(jnp.asarray(case.x_TD), leaf, "silu", "bfloat16")
        np.testing.assert_array_equal(found_TF, apart_TF)


def test_adapters_of_another_product_are_refused():
    need()
    case = Case.of(4, 64, (32, 48))
    w = packed.pack(drawn(9, 48, 64))
    x_TD, leaf = jnp.asarray(case.x_TD), case.leaf(w)
    operands = adapted_cpu.operands(x_TD, leaf)
    order = operands[5]
    for nth, wrong in (
        (0, x_TD[:3]), (0, x_TD[:, :32]), (1, operands[1][:2]), (2, operands[2][:, :1]),
        (3, operands[3][:2]), (4, order[:3]), (5, order[:3]), (5, order + 1), (6, operands[6][:0]),
    ):  # fmt: skip
        changed = [*operands[:nth], wrong, *operands[nth + 1 :]]
        with refused("do not go with"):
            jax.block_until_ready(packed.product(x_TD, w, changed))
