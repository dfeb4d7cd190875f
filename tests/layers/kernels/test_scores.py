"""Scores of an indexer's heads: the native kernel against float64 and XLA's products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import ffi_cpu
from layers.kernels.attention.contract import Options
from layers.mixers import indexer
from tests import compiling
from tests.layers.native import instruction_set, refused  # noqa: F401

_CASES = {  # I, X, query tokens, page tokens, the pages' format, queries
    "float32": (4, 64, 3, 16, "float32", "float32"),
    "float32, odd": (5, 7, 2, 16, "float32", "float32"),
    "bfloat16": (4, 64, 1, 128, "bfloat16", "bfloat16"),
    "bfloat16, many tokens": (8, 128, 40, 16, "bfloat16", "bfloat16"),
    "bfloat16, entries": (3, 10, 2, 4, "bfloat16", "bfloat16"),
    "int8": (4, 128, 3, 16, "int8", "bfloat16"),
    "fp8": (4, 48, 3, 16, "fp8", "bfloat16"),
    "int4": (4, 64, 3, 16, "int4", "float32"),
}
_CAPACITY = 1536


@functools.cache
def _stored(page_format):
    """Rows as pages have them, and what these say."""

    def run(row_TX):
        if not page_format.is_quantized:
            row_TX = page_rows.encode(
                row_TX, jnp.zeros(0, page_rows.stored_dtype(page_format.dtype))
            )
            return row_TX, page_rows.decode(row_TX)
        row_TX = page_rows.quantize(row_TX, page_format)
        return row_TX, page_rows.dequantize(row_TX, page_format, jnp.float32)

    return compiling.jit(run)


class _Case:
    """Queries and keys of ragged rows. Page 0, every key that no row may look at and, if it is
    given, one (row, key) are poisoned.
    """

    def __init__(self, name, counts=(0, 1, 63, 64, 1100, 130), poisoned=None):
        generator = np.random.default_rng(0)
        num_heads, X, W, page, stored, dtype = _CASES[name]
        self.page_format = PageFormat(1, X, 0, False, stored)
        Y, P = len(counts), _CAPACITY // page
        self.counts = np.array(counts, np.int32)
        self.table_YP = 1 + generator.permutation(Y * P).reshape(Y, P).astype(np.int32)
        self.q_YWIX = generator.standard_normal((Y, W, num_heads, X)).astype(jnp.dtype(dtype))
        self.weights_YWI = np.float32(generator.standard_normal((Y, W, num_heads)))
        self.is_counted_YS = np.arange(_CAPACITY) < self.counts[:, None]
        k_YSX = np.float32(generator.standard_normal((Y, _CAPACITY, X)))
        k_YSX[~self.is_counted_YS] = np.nan
        if poisoned is not None:
            k_YSX[poisoned] = np.nan
        rows = np.full((1 + Y * P, page, X), np.nan, np.float32)
        rows[self.table_YP] = k_YSX.reshape(Y, P, page, X)
        stored_TX, decoded_TX = _stored(self.page_format)(rows.reshape(-1, X))
        self.pages = stored_TX.reshape(*rows.shape[:2], -1)
        decoded = np.asarray(decoded_TX, np.float64).reshape(rows.shape)
        self.k_YSX = decoded[self.table_YP].reshape(Y, _CAPACITY, X)

    def scores(
        self, function=ffi_cpu.index_scores, rows=slice(None), tokens=slice(None), **changes
    ):
        """What is to be looked at, NaN elsewhere."""
        arrays = {"table_YP": self.table_YP, "pages": self.pages} | changes
        scores_YWS = function(
            self.q_YWIX[rows, tokens], self.weights_YWI[rows, tokens], arrays["pages"],
            arrays["table_YP"][rows], self.counts[rows], self.page_format, Options(),
        )  # fmt: skip
        is_counted_YS = np.arange(scores_YWS.shape[-1]) < self.counts[rows, None]
        return np.where(is_counted_YS[:, None], scores_YWS, np.nan)

    @functools.cached_property
    def exact(self):
        """In float64, of what is stored."""
        products_YWIS = np.einsum("YWIX,YSX->YWIS", self.q_YWIX.astype(np.float64), self.k_YSX)
        products_YWIS = np.maximum(products_YWIS, 0)
        scores_YWS = np.einsum("YWI,YWIS->YWS", self.weights_YWI, products_YWIS)
        return np.where(self.is_counted_YS[:, None], scores_YWS, np.nan)


@functools.cache
def _case(name):
    return _Case(name)


@pytest.mark.parametrize("name", _CASES)
def test_scores_equal_float64(instruction_set, name):  # noqa: F811
    case = _case(name)
    np.testing.assert_allclose(case.scores(), case.exact, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_scores_are_those_of_xlas_products(instruction_set, name):  # noqa: F811
    """Of few bits keys are rounded there, once their scales multiplied them."""
    case = _case(name)
    near = 0.25 if case.page_format.is_quantized else 1e-4
    np.testing.assert_allclose(case.scores(), case.scores(indexer._scores), rtol=0, atol=near)


@pytest.mark.parametrize("name", _CASES)
def test_a_score_has_the_same_bits_in_any_company(instruction_set, name):  # noqa: F811
    """Of any rows and tokens beside it, and in a table of any width: so on any number of threads,
    which take tokens and keys in pieces.
    """
    case = _case(name)
    whole = case.scores()
    for rows in (slice(4, 5), slice(1, 3)):
        np.testing.assert_array_equal(case.scores(rows=rows), whole[rows])
    np.testing.assert_array_equal(case.scores(tokens=slice(1)), whole[:, :1])
    np.testing.assert_array_equal(case.scores(tokens=slice(1, None)), whole[:, 1:])
    wide_YP = np.pad(case.table_YP, ((0, 0), (0, 500)))
    np.testing.assert_array_equal(case.scores(table_YP=wide_YP)[..., :_CAPACITY], whole)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_a_keys_nan_is_its_own(instruction_set, name):  # noqa: F811
    case = _Case(name, poisoned=(4, 1066))
    scores_YWS = case.scores()
    expected = ~np.broadcast_to(case.is_counted_YS[:, None], scores_YWS.shape)
    expected[4, :, 1066] = True
    np.testing.assert_array_equal(np.isnan(scores_YWS), expected)


def test_no_page_is_read_that_is_not_there(instruction_set):  # noqa: F811
    case = _Case("float32")
    for wild in (1 << 30, -(1 << 30)):
        jax.block_until_ready(case.scores(table_YP=np.full_like(case.table_YP, wild)))
    case.counts = np.full_like(case.counts, 1 << 30)
    jax.block_until_ready(case.scores())
    case.counts = -case.counts
    assert np.isnan(case.scores()).all()
    with refused("do not go together"):
        case.scores(pages=case.pages[..., :-1])
    with refused("another type"):
        case.scores(pages=case.pages.astype(jnp.uint8))
