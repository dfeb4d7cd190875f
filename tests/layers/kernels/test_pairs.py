"""Products of pairs of bfloat16, by the instruction and by what stands in for it: AVX-512."""

import ctypes
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.cpu import build, library
from layers.kernels.cpu.library import DEPTH, STRIP
from layers.kernels.linear import packed
from tests.layers import native

_HERE = Path(__file__).parent
_SOURCE = """
#include "dpbf16.h"
extern "C" void multiply(const Product* p) { InPairs<Dpbf16>::multiply(*p); }
extern "C" void round_row(const float* row, int64_t size, int64_t depth, uint16_t* out) {
  put<InPairs<Dpbf16>>(row, true, size, depth, out, 0);
}
"""


class _Product(ctypes.Structure):
    """`Product` of kernels.h."""

    _fields_ = (
        ("strips", ctypes.c_void_p), ("num_strips", ctypes.c_int64), ("depth", ctypes.c_int64),
        ("x", ctypes.c_void_p), ("num_rows", ctypes.c_int64), ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64), ("accumulates", ctypes.c_bool), ("is_far", ctypes.c_bool),
        ("shift", ctypes.c_int), ("x_padding", ctypes.c_int64), ("y_is_far", ctypes.c_bool),
        ("strip_depth", ctypes.c_int64),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["avx512", "avx512bf16"])
def pairs(request, tmp_path_factory):
    """The functions of `_SOURCE`."""
    native.need()
    if library.product_seconds(request.param) < 0:
        pytest.skip(f"this processor has no {request.param}")
    source = tmp_path_factory.mktemp("pairs") / "pairs.cc"
    source.write_text(_SOURCE)
    compiler = build._compilers()[0]
    means = ("-include", _HERE / "avx512bf16.h") if request.param == "avx512" else ("-mavx512bf16",)
    command = [
        *compiler, *build._FLAGS, "-fvisibility=default", "-O1", "-shared",
        *build._at_level(compiler, "x86-64-v4"), *means, "-I", build._SOURCES,
        source, "-o", source.with_suffix(".so"),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


def _rounded(pairs, x_TD):
    """Rows as they are multiplied: bfloat16 as its bits, padded to whole depths."""
    T, D = x_TD.shape
    rows_TD = np.full((T, -(-D // DEPTH) * DEPTH), 0xFFFF, np.uint16)
    for x_D, row_D in zip(x_TD, rows_TD, strict=True):
        pairs.round_row(
            x_D.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(D), ctypes.c_int64(len(row_D)),
            row_D.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
    return rows_TD


def _multiply(pairs, rows_TD, strips, before_TF=None, is_far=True):
    """The sums of all strips; added to others, if there are some."""
    T, depth = rows_TD.shape
    F = len(strips) * STRIP
    y_TF = np.full((T, F + STRIP), np.nan, np.float32)  # rows lie apart
    if before_TF is not None:
        y_TF[:, :F] = before_TF
    strips, rows_TD = np.ascontiguousarray(strips), np.ascontiguousarray(rows_TD)
    product = _Product(
        strips.ctypes.data, len(strips), depth, rows_TD.ctypes.data, T, y_TF.ctypes.data,
        F + STRIP, before_TF is not None, is_far,
    )  # fmt: skip
    pairs.multiply(ctypes.byref(product))
    assert np.isnan(y_TF[:, F:]).all()
    return y_TF[:, :F]


def _strips(w_FD):
    return np.array(packed.pack(w_FD).data).reshape(-(-len(w_FD) // STRIP), -1)


def test_500_random_products(pairs):
    """Of any shape, with sums to begin with and without."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        T, F, D = rng.integers(1, 30), rng.integers(1, 150), rng.integers(1, 150)
        x_TD = rng.standard_normal((T, D), np.float32)
        w_FD = rng.standard_normal((F, D)).astype(jnp.bfloat16)
        before_TF = rng.standard_normal((T, -(-F // STRIP) * STRIP), np.float32)
        before_TF = before_TF if rng.random() < 0.3 else None
        rows_TD = _rounded(pairs, x_TD)
        exact_TD = x_TD.astype(jnp.bfloat16)
        np.testing.assert_array_equal(rows_TD[:, :D], exact_TD.view(np.uint16))
        assert not rows_TD[:, D:].any()
        sums_TF = _multiply(pairs, rows_TD, _strips(w_FD), before_TF)[:, :F]
        start_TF = 0 if before_TF is None else before_TF[:, :F].astype(np.float64)
        w_FD, exact_TD = w_FD.astype(np.float64), exact_TD.astype(np.float64)
        exact_TF = exact_TD @ w_FD.T + start_TF
        size_TF = np.abs(exact_TD) @ np.abs(w_FD).T + np.abs(start_TF)
        assert (np.abs(sums_TF - exact_TF) <= size_TF * (2e-7 * np.sqrt(D) + 1e-6)).all()


@pytest.mark.parametrize("D", [64, 2304])  # at once, and by parts
def test_a_sum_has_one_order(pairs, D):
    """Whatever rows and strips are beside it, and in whatever parts its depth comes."""
    rng = np.random.default_rng(0)
    rows_TD = _rounded(pairs, rng.standard_normal((70, D), np.float32))
    strips = _strips(rng.standard_normal((11 * STRIP, D)).astype(jnp.bfloat16))
    alone_TF = np.concatenate([_multiply(pairs, row_D[None], strips) for row_D in rows_TD])
    for T in (*range(1, 20), 24, 32, 33, 70):
        for strip, stop in ((0, 11), (3, 4), (2, 5), (1, 7), (0, 8)):
            expected = alone_TF[-T:, strip * STRIP : stop * STRIP]
            for is_far in (False, True):
                sums = _multiply(pairs, rows_TD[-T:], strips[strip:stop], is_far=is_far)
                np.testing.assert_array_equal(sums, expected)
    first, second = (
        strips.reshape(len(strips), D // 2, -1)[:, part]
        for part in (slice(None, D // 4), slice(D // 4, None))
    )
    before_TF = _multiply(pairs, rows_TD[:, : D // 2], first)
    sums_TF = _multiply(pairs, rows_TD[:, D // 2 :], second, before_TF)
    np.testing.assert_array_equal(sums_TF, alone_TF)


def test_the_second_of_a_pair_is_added_first(pairs):
    """Each sum is rounded to even, and what is denormal counts as 0."""
    pairs_T = (1, -(2.0**24)), (1, 1), (2.0**-100, 0), (2.0**-130, 0), (0, 2.0**10)
    x_TD, w_FD = np.zeros((5, 32), np.float32), np.zeros((32, 32), np.float32)
    x_TD[:, :2], w_FD[:16, :2], w_FD[16:, :2] = pairs_T, (1, 1), (2.0**-30, 2.0**-130)
    rows_TD, strips = _rounded(pairs, x_TD), _strips(w_FD.astype(jnp.bfloat16))
    sums_TF = _multiply(pairs, rows_TD, strips, np.full((5, 32), 2.0**24, np.float32))
    np.testing.assert_array_equal(sums_TF[:2, 0], (1, 2.0**24))
    np.testing.assert_array_equal(_multiply(pairs, rows_TD, strips)[2:, -1], 0)


def test_what_is_not_finite_stays_so(pairs):
    x_TD, w_FD = np.ones((9, 64), np.float32), np.ones((32, 64), np.float32)
    x_TD[3, 5], x_TD[8, 63], w_FD[17, 0] = np.nan, np.inf, -np.inf
    sums_TF = _multiply(pairs, _rounded(pairs, x_TD), _strips(w_FD.astype(jnp.bfloat16)))
    expected_TF = np.full((9, 32), 64, np.float32)
    expected_TF[:, 17], expected_TF[3], expected_TF[8] = -np.inf, np.nan, np.inf
    expected_TF[8, 17] = np.nan
    np.testing.assert_array_equal(sums_TF, expected_TF)
