"""Bounds of what the keys of pages score: the native kernel against float64 and XLA's products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import ffi_cpu
from layers.kernels.attention.contract import Options
from layers.sparse import quest
from tests.layers.native import EMULATED, instruction_set, refused  # noqa: F401

_HEADS = {  # K, G, H
    "one head of each": (3, 1, 64),
    "groups of three": (3, 3, 64),
    "groups of eight": (2, 8, 128),
    "odd": (2, 3, 7),
    "odd, wide": (3, 1, 75),
    "narrow": (5, 2, 16),
    "one KV head": (1, 3, 24),
}


class _Case:
    """Queries and extremes of random pages; page 0, and what no row may look at, is poisoned."""

    def __init__(self, heads, dtype, counts=(0, 1, 63, 131, 64), tokens=3, columns=136, seed=0):
        generator = np.random.default_rng(seed)
        K, G, H = _HEADS[heads]
        self.shape = len(counts), tokens, K, columns
        self.page_format = PageFormat(K, H, H, False, dtype)
        self.counts = np.array(counts, np.int32)
        keys = generator.standard_normal((sum(counts) + 1, 4, K * H))
        extremes = np.stack([keys.min(1), keys.max(1)], axis=1).astype(jnp.dtype(dtype))
        extremes[0] = np.nan
        q = generator.standard_normal((len(counts), tokens, K * G, H))
        self.q_YWNH = jnp.asarray(q, dtype)
        self.extremes = np.asarray(extremes)
        self.table_YP = np.zeros((len(counts), columns), np.int32)
        ids = 1 + generator.permutation(sum(counts))
        for own_P, count in zip(self.table_YP, counts, strict=True):
            own_P[:count], ids = ids[:count], ids[count:]

    def found(self, function=ffi_cpu.page_bounds, rows=slice(None), **changes):
        """What is to be looked at, NaN elsewhere."""
        told = {"q_YWNH": self.q_YWNH, "table_YP": self.table_YP} | changes
        stored = page_rows.stored_dtype(self.page_format.dtype)
        extremes = page_rows.encode(jnp.asarray(self.extremes), jnp.zeros(0, stored))
        own = function(
            told["q_YWNH"][rows], extremes, told["table_YP"][rows], self.counts[rows],
            self.page_format, Options(deterministic=True),
        )  # fmt: skip
        is_told_YP = np.arange(own.shape[-1]) < self.counts[rows, None]
        return np.where(is_told_YP[:, None, None], own, np.nan)

    def exact(self):
        """In float64, a product of each query head."""
        Y, W, K, P = self.shape
        q = np.asarray(self.q_YWNH, np.float64).reshape(Y, W, K, -1, 1, self.page_format.key_width)
        extremes = self.extremes.astype(np.float64).reshape(-1, 2, K, q.shape[-1])
        own_YPXKH = extremes[self.table_YP]
        low, high = (own_YPXKH[:, :, x].swapaxes(1, 2)[:, None, :, None] for x in (0, 1))
        bounds = np.maximum(q * low, q * high).sum((3, 5))
        return np.where((np.arange(P) < self.counts[:, None])[:, None, None], bounds, np.nan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", _HEADS)
def test_bounds_equal_float64(instruction_set, heads, dtype):  # noqa: F811
    """Elements are what they are, summed in float32."""
    case = _Case(heads, dtype)
    np.testing.assert_allclose(case.found(), case.exact(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_exceed_the_scores_of_every_key(instruction_set, dtype):  # noqa: F811
    """Keys that are their page's smallest or largest element in each place, at random."""
    case = _Case("groups of eight", dtype, counts=(40, 25))
    Y, W, K, P = case.shape
    generator, bounds = np.random.default_rng(1), case.found()
    which = generator.integers(0, 2, (20, case.extremes.shape[-1]))
    q = np.asarray(case.q_YWNH, np.float64).reshape(Y, W, K, -1, case.page_format.key_width)
    for own in which:
        keys = np.where(own, case.extremes[:, 1], case.extremes[:, 0]).astype(np.float64)
        key_YPKH = keys.reshape(len(keys), K, -1)[case.table_YP]
        scores = np.einsum("YWKGH,YPKH->YWKP", q, key_YPKH)
        assert not (scores > bounds + 1e-4).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", _HEADS)
def test_a_bound_has_the_same_bits_in_any_company(instruction_set, heads, dtype):  # noqa: F811
    """Of any rows and tokens beside it, and in a table of any width: so on any number of threads,
    which take rows and pages in pieces.
    """
    case = _Case(heads, dtype, tokens=70)
    whole = case.found()
    for rows in (slice(3, 4), slice(1, 3)):
        np.testing.assert_array_equal(case.found(rows=rows), whole[rows])
    wide_YP = np.pad(case.table_YP, ((0, 0), (0, 500)))
    np.testing.assert_array_equal(case.found(table_YP=wide_YP)[..., :136], whole)
    for tokens in (slice(1), slice(5, 9), slice(69, None)):
        found = case.found(q_YWNH=case.q_YWNH[:, tokens])
        np.testing.assert_array_equal(found, whole[:, tokens])
    moved_YP = np.roll(case.table_YP, 1, axis=1)  # a page stands elsewhere
    case.counts = case.counts + 1
    np.testing.assert_array_equal(case.found(table_YP=moved_YP)[1:, ..., 1:], whole[1:, ..., :-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_as_in_xlas_products(instruction_set, dtype, value):  # noqa: F811
    """Of a page with one KV head: in XLA's products one head's NaN is every head's."""
    for place in ("smallest", "largest", "query"):
        case = _Case("one KV head", dtype)
        if place == "query":
            case.q_YWNH = case.q_YWNH.at[3, 1, 1, 19].set(value)
        else:
            case.extremes[case.table_YP[3, [0, 7, 130]], int(place == "largest"), 19] = value
        found, expected = case.found(), case.found(quest._page_bounds)
        kinds = [np.isnan, np.isposinf, np.isneginf]
        # A NaN of numbers has the sign that its processor gives it, and XLA runs on this one.
        if np.isnan(value) or instruction_set not in EMULATED:
            kinds.append(np.signbit)
        for is_kind in kinds:
            both = [is_kind(x)[~np.isfinite(x)] for x in (found, expected)]
            np.testing.assert_array_equal(*both)
        near = dict(rtol=0, atol=1e-4) if dtype == "float32" else dict(rtol=0.02, atol=0.2)
        np.testing.assert_allclose(found, expected, **near)


def test_a_heads_nan_is_its_own(instruction_set):  # noqa: F811
    case = _Case("groups of three", "bfloat16", counts=(9, 5))
    case.extremes[case.table_YP[0, 6], 1, 70] = np.nan  # of the second KV head
    expected = ~(np.arange(136) < case.counts[:, None])[:, None, None].repeat(3, 2).repeat(3, 1)
    expected[0, :, 1, 6] = True
    np.testing.assert_array_equal(np.isnan(case.found()), expected)


def test_no_page_is_read_that_is_not_there(instruction_set):  # noqa: F811
    case = _Case("groups of three", "float32")
    for wild in (1 << 30, -(1 << 30)):
        jax.block_until_ready(case.found(table_YP=np.full_like(case.table_YP, wild)))
    case.counts = np.full_like(case.counts, 1 << 30)
    np.testing.assert_array_equal(np.isnan(case.found()), case.exact() != case.exact())
    case.counts = -case.counts
    assert np.isnan(case.found()).all()
    case.extremes = case.extremes[:0]
    with refused("do not go together"):
        case.found()
