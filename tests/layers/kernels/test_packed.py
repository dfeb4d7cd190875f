"""Products with packed weights against float64, on every instruction set."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.cpu.rows import gate
from layers.kernels.linear import packed
from layers.linear import linear
from tests.layers.native import ROUNDING, instruction_set, need  # noqa: F401

_SHAPES = [(1, 576, 960), (2, 64, 272), (3, 64, 40), (5, 33, 17), (7, 6, 5), (13, 96, 130),
           (16, 576, 64), (17, 96, 48), (33, 64, 100), (48, 160, 31), (130, 64, 48),
           (40, 1024, 48), (14, 4500, 33)]  # fmt: skip


def _drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def _check(name, T, D, F, weights, inputs):
    """Some instructions take bfloat16 only, and round activations."""
    x_TD, w_FD = _drawn(T, T, D, dtype=inputs), _drawn(D, F, D, dtype=weights)
    y_TF = np.asarray(jax.jit(linear)(x_TD, packed.pack(w_FD)))
    if name in ROUNDING and weights == "bfloat16":
        x_TD = x_TD.astype(jnp.bfloat16)
    exact = x_TD.astype(np.float64) @ w_FD.astype(np.float64).T
    size = np.abs(x_TD.astype(np.float64)) @ np.abs(w_FD.astype(np.float64)).T
    chex.assert_shape(y_TF, (T, F))
    chex.assert_type(y_TF, np.float32)
    assert (np.abs(y_TF - exact) / size).max() < 2e-7 * np.sqrt(D) + 1e-6


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
def test_products_are_exact_up_to_their_sums(instruction_set, weights, inputs):  # noqa: F811
    for T, D, F in _SHAPES:
        _check(instruction_set, T, D, F, weights, inputs)


@pytest.mark.long
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_500_random_products(instruction_set, weights):  # noqa: F811
    rng = np.random.default_rng(0)
    for _ in range(500):
        T, D, F = (int(2 ** rng.uniform(0, most)) for most in (7, 12, 9))
        _check(instruction_set, T, D, F, weights, str(rng.choice(["float32", "bfloat16"])))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(instruction_set, weights):  # noqa: F811
    for D, F, counts in (
        (96, 100, (1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 32, 33, 64, 149)),
        (4096, 40, (1, 3, 4, 5, 14, 37)),  # rows that are put a line further apart, parts of depth
    ):
        x_TD, w = _drawn(0, 150, D), packed.pack(_drawn(1, F, D, dtype=weights))
        whole = np.asarray(jax.jit(linear)(x_TD, w))
        for rows in counts:
            np.testing.assert_array_equal(jax.jit(linear)(x_TD[:rows], w), whole[:rows])
            np.testing.assert_array_equal(jax.jit(linear)(x_TD[-rows:], w), whole[-rows:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_its_two_steps(instruction_set, activation, dtype):  # noqa: F811
    for T, D, F in ((1, 96, 64), (7, 33, 352), (40, 96, 32), (150, 64, 96)):
        x_TD, w = _drawn(0, T, D), packed.pack(_drawn(1, F, D, dtype="bfloat16"))
        x_TD[(T + 1) // 2 : T - T // 4] = 0  # as padding
        assert packed.multiplies_gated(w)
        apart_TF = gate(packed.product(x_TD, w), activation, dtype)
        found_TF = packed.gated_product(x_TD, w, activation, dtype)
        assert found_TF.dtype == dtype
        np.testing.assert_array_equal(found_TF, apart_TF)


def test_products_are_gated_where_gates_are_whole_strips(instruction_set):  # noqa: F811
    assert not packed.multiplies_gated(_drawn(0, 64, 32))
    assert not packed.multiplies_gated(packed.pack(_drawn(0, 48, 32)))
    blocks = packed.pack_rows(np.zeros((64, 34), np.uint8), "q8_0", (64, 32))
    assert packed.multiplies_gated(blocks)
    with packed.exact(True):
        assert not packed.multiplies_gated(blocks)


@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
@pytest.mark.parametrize("D", [96, 33])
def test_rows_of_zeros_are_left_out(instruction_set, inputs, D):  # noqa: F811
    """They get zeros, whatever is in the matrix; the others have the bits that they have alone."""
    x_TD, w_FD = _drawn(0, 150, D, dtype=inputs), _drawn(1, 100, D, dtype=inputs)
    whole = np.asarray(jax.jit(linear)(x_TD, packed.pack(w_FD)))
    w_FD[3] = np.nan
    w, expected = packed.pack(w_FD), whole.copy()
    expected[:, 3] = np.nan
    rng = np.random.default_rng(2)
    places_T = np.arange(150)
    for is_zero_T in (
        *(places_T > 5, places_T < 140, abs(places_T - 70) > 40, places_T == 7),
        *(rng.random((3, 150)) < 0.6),
        np.full(150, True),
    ):
        rows_TD = np.where(is_zero_T[:, None], np.copysign(0, x_TD), x_TD).astype(x_TD.dtype)
        found = jax.jit(linear)(rows_TD, w)
        np.testing.assert_array_equal(found, np.where(is_zero_T[:, None], 0, expected))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_rows_of_a_packed_table_are_its_rows(instruction_set, weights):  # noqa: F811
    table_VD = _drawn(0, 37, 18, dtype=weights)
    ids = jnp.array([0, 36, 15, 16, 0])
    found = jax.jit(packed.rows)(packed.pack(table_VD), ids)
    np.testing.assert_array_equal(found, table_VD[ids].astype(np.float32))


_GROUPS = [  # rows of each expert, D, F; then rows of padding
    ((1, 0, 1), 64, 272, 0), ((0, 0, 0), 64, 40, 3), ((5, 0, 17, 33, 1), 33, 17, 4),
    ((0, 0, 300), 96, 130, 0), ((13, 2, 0, 0), 6, 5, 70), ((), 32, 16, 2), ((4,), 576, 64, 0),
]  # fmt: skip


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
def test_each_group_of_rows_meets_its_own_matrix(instruction_set, weights, inputs):  # noqa: F811
    rounds = instruction_set in ROUNDING and weights == "bfloat16"
    for sizes, D, F, padding in _GROUPS:
        E, X = len(sizes), sum(sizes) + padding
        x_XD, w_EFD = _drawn(X, X, D, dtype=inputs), _drawn(D, E, F, D, dtype=weights)
        w, sizes_E = packed.pack(w_EFD), np.array(sizes, np.int32)
        found = np.asarray(jax.jit(packed.grouped_product)(x_XD, w, sizes_E))
        chex.assert_shape([found, w], [(X, F), (E, F, D)])
        chex.assert_type(found, np.float32)
        x_XD = x_XD.astype(jnp.bfloat16) if rounds else x_XD
        start = 0
        for size, w_FD in zip(sizes, w_EFD.astype(np.float64), strict=True):
            rows = slice(start, start + size)
            exact = x_XD[rows].astype(np.float64) @ w_FD.T
            size_XF = np.abs(x_XD[rows].astype(np.float64)) @ np.abs(w_FD).T
            assert (np.abs(found[rows] - exact) <= size_XF * (2e-7 * np.sqrt(D) + 1e-6)).all()
            start = rows.stop
        assert not found[start:].any()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_row_of_a_group_has_the_bits_of_its_product(instruction_set, weights):  # noqa: F811
    """Whatever lies beside it: other rows of its matrix, other groups, or nothing."""
    x_XD, w_EFD = _drawn(0, 90, 96), _drawn(1, 3, 100, 96, dtype=weights)
    w, grouped = packed.pack(w_EFD), jax.jit(packed.grouped_product)
    alone = [np.asarray(jax.jit(linear)(x_XD, packed.pack(w_FD))) for w_FD in w_EFD]
    for sizes in ((1, 1, 0), (0, 2, 1), (7, 0, 40), (30, 33, 27), (0, 90, 0), (17, 16, 15)):
        ends = np.cumsum(sizes)
        found = np.asarray(grouped(x_XD[: ends[-1]], w, np.array(sizes, np.int32)))
        for e, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            rows = slice(end - size, end)
            np.testing.assert_array_equal(found[rows], alone[e][rows])


def test_sizes_that_rows_do_not_have_are_cut():
    need()
    x_XD, w_EFD = _drawn(0, 20, 32), _drawn(1, 4, 40, 32)
    w, grouped, most = packed.pack(w_EFD), jax.jit(packed.grouped_product), 2**31 - 1
    for sizes, cut in (
        ((most, most, most, most), (20, 0, 0, 0)), ((-1, 5, -most - 1, 3), (0, 5, 0, 3)),
        ((15, -20, most, 1), (15, 0, 5, 0)), ((0, 19, 2, -5), (0, 19, 1, 0)),
    ):  # fmt: skip
        found, expected = (grouped(x_XD, w, np.array(each, np.int32)) for each in (sizes, cut))
        np.testing.assert_array_equal(found, expected)
        assert not np.asarray(found)[sum(cut) :].any()


def test_groups_that_do_not_fit_their_stack_are_refused():
    need()
    x_XD, w, sizes_E = _drawn(0, 4, 32), packed.pack(_drawn(1, 2, 5, 32)), jnp.array([3, 1])
    assert packed.grouped_product(x_XD[:0], w, sizes_E).shape == (0, 5)
    one = packed.pack(_drawn(1, 5, 32))
    for rows, stack, sizes in (
        (x_XD[:, 1:], w, sizes_E), (x_XD, one, sizes_E), (x_XD, w, sizes_E[1:]),
        (x_XD, w, sizes_E.astype(float)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="packed stack|sizes of int32"):
            packed.grouped_product(rows, stack, sizes)
    with pytest.raises(ValueError, match="packed matrix"):
        packed.product(x_XD, w)
    with pytest.raises(ValueError, match="looked up"):
        packed.rows(w, jnp.array([0]))


def test_a_stack_lies_matrix_after_matrix():
    need()
    w_EFD = _drawn(0, 3, 21, 40, dtype="bfloat16")
    stack = packed.pack(w_EFD)
    described = packed.abstract(w_EFD.shape, "bfloat16")
    assert (stack.data.shape, stack.data.dtype) == (described.data.shape, described.data.dtype)
    for strips, w_FD in zip(stack.data, w_EFD, strict=True):
        np.testing.assert_array_equal(strips, packed.pack(w_FD).data)


def test_other_matrices_are_refused():
    need()
    with pytest.raises(ValueError, match="float16"):
        packed.pack(np.zeros((16, 32), np.float16))
    with pytest.raises(ValueError, match="no matrix"):
        packed.pack(np.zeros((2, 2, 16, 32), np.float32))
