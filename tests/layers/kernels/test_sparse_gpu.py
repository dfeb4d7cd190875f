"""Hopper's kernels for queries that choose what they read, interpreted, against float64."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import gpu, gpu_bounds, gpu_index, gpu_stretches
from layers.kernels.attention.contract import Options, Stretch
from layers.kernels.attention.mask import MaskBounds
from layers.ragged import Rectangle
from layers.sparse import chosen
from tests import compiling
from tests.interpreted import (
    HOPPER,
    blocks_in_order,
    check_races,
    sum_error,
    threads_are_compiled_once,  # noqa: F401
)

pytestmark = pytest.mark.quick_code


@functools.cache
def _program(function, case, interpret):
    """A kernel of arrays, which several batches share."""
    return compiling.jit(functools.partial(function, case, interpret))


def _computed(function, case, interpret, *arguments):
    """What a kernel returns, without a race."""
    result = np.asarray(_program(function, case, interpret)(*arguments))
    check_races(interpret)
    return result


def _check_attended(case, out_YWNV, expected, size, valid_YW):
    """Weights of the softmax, and what leaves the kernel, are rounded to its type; beside that the
    roundings of float32 are small.
    """
    roundoff = float(jnp.finfo(case.dtype).eps) / 2
    bound = 2e-5 + roundoff * (size + np.abs(expected))
    assert (np.abs(out_YWNV - expected) <= bound)[valid_YW].all()


def _in_pages(rows_YSX, page_tokens, generator, values=slice(0)):
    """Token-major pages of rows as they are stored, in random order, and the rows' tables. Page 0
    is as the engine leaves it: NaN beside values of 0.
    """
    Y, S, X = rows_YSX.shape
    table_YP = 1 + generator.permutation(Y * S // page_tokens).reshape(Y, -1).astype(np.int32)
    pages = np.full((1 + table_YP.size, page_tokens, X), np.nan, rows_YSX.dtype)
    pages[0, :, values] = 0
    pages[table_YP] = rows_YSX.reshape(*table_YP.shape, page_tokens, X)
    return _stored(pages), table_YP


def _stored(x):
    """Numbers as pages store them."""
    return page_rows.encode(jnp.asarray(x), jnp.zeros(0, page_rows.stored_dtype(x.dtype.name)))


class Scores(NamedTuple):
    """An indexer's heads over the keys of some rows."""

    num_heads: int
    width: int  # X
    tokens: int  # W
    page_tokens: int
    dtype: str = "bfloat16"
    num_splits: int | None = None


SCORES = {
    "deepseek-v3.2": Scores(64, 128, 1, 64, num_splits=2),
    "deepseek-v4, drafts": Scores(64, 128, 3, 32),
    "odd heads, several tiles": Scores(5, 64, 6, 64, "float16"),
    "large pages": Scores(8, 64, 2, 128, num_splits=3),
    "small pages": Scores(4, 64, 1, 16),
}


def _scores(case, interpret, *arguments):
    sizes = {"num_splits": case.num_splits, "interpret": interpret}
    index_format = PageFormat(1, case.width, 0, False, case.dtype)
    return gpu_index.index_scores(*arguments, index_format, **sizes)


def check_scores(case, counts, seed, interpret=HOPPER):
    """Keys that no row may look at are NaN."""
    generator = np.random.default_rng(seed)
    Y, S, dtype = len(counts), 384, jnp.dtype(case.dtype)
    count_Y = np.array(counts, np.int32)
    k_YSX = generator.standard_normal((Y, S, case.width)).astype(dtype)
    k_YSX[np.arange(S) >= count_Y[:, None]] = np.nan
    pages, table_YP = _in_pages(k_YSX, case.page_tokens, generator)
    shape = Y, case.tokens, case.num_heads
    q_YWIX = generator.standard_normal((*shape, case.width)).astype(dtype)
    weights_YWI = np.float32(generator.standard_normal(shape))
    scores_YWS = _computed(_scores, case, interpret, q_YWIX, weights_YWI, pages, table_YP, count_Y)
    arrays = [np.float64(x) for x in (q_YWIX, np.nan_to_num(k_YSX))]
    products = np.einsum("YWIX,YSX->YWIS", *arrays)
    sizes = np.einsum("YWIX,YSX->YWIS", *map(np.abs, arrays))
    exact_YWS = np.einsum("YWI,YWIS->YWS", weights_YWI, np.maximum(products, 0))
    is_counted_YWS = np.broadcast_to((np.arange(S) < count_Y[:, None])[:, None], exact_YWS.shape)
    bound_YWS = sum_error(interpret) * np.einsum("YWI,YWIS->YWS", np.abs(weights_YWI), sizes)
    assert (np.abs(scores_YWS - exact_YWS) <= bound_YWS)[is_counted_YWS].all()


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_an_indexer(name):
    check_scores(SCORES[name], (0, 1, 64, 300, 384), 0)


@pytest.mark.long
@pytest.mark.parametrize("name", SCORES)
def test_500_random_batches_of_scores(name):
    for seed in range(1, 101):
        counts = np.random.default_rng(seed).integers(0, 385, 3)
        check_scores(SCORES[name], counts.tolist(), seed)


class Bounds(NamedTuple):
    """Queries over pages of keys."""

    heads: tuple[int, int]  # N, K
    width: int  # H
    tokens: int  # W
    dtype: str = "bfloat16"


BOUNDS = {
    "llama3": Bounds((8, 2), 128, 1),
    "odd group, drafts": Bounds((9, 3), 64, 3, "float16"),
    "wide heads, several tiles": Bounds((2, 1), 256, 70),
}


def _bounds(case, interpret, *arguments):
    page_format = PageFormat(case.heads[1], case.width, case.width, False, case.dtype)
    return gpu_bounds.page_bounds(*arguments, page_format, interpret=interpret)


def check_bounds(case, counts, seed, interpret=HOPPER):
    """Of the parts of queries as they are stored. What no row may look at is NaN, and so is one
    head of a page.
    """
    generator, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    (N, K), H, W, Y, P = case.heads, case.width, case.tokens, len(counts), 150
    count_Y = np.array(counts, np.int32)
    extremes = np.sort(generator.standard_normal((1 + Y * P, 2, K * H)), axis=1).astype(dtype)
    table_YP = 1 + generator.permutation(Y * P).reshape(Y, P).astype(np.int32)
    is_counted_YP = np.arange(P) < count_Y[:, None]
    extremes[[0, *table_YP[~is_counted_YP]]] = np.nan
    extremes[table_YP[-1, 0], 1, :H] = np.nan
    q_YWNH = generator.standard_normal((Y, W, N, H)).astype(dtype)
    bounds_YWKP = _computed(_bounds, case, interpret, q_YWNH, _stored(extremes), table_YP, count_Y)
    q_YWKGH = np.float32(q_YWNH).reshape(Y, W, K, -1, H)
    signed = tuple(bound(q_YWKGH, 0).sum(3).astype(dtype) for bound in (np.minimum, np.maximum))
    pages_YPSKH = np.float64(extremes).reshape(-1, 2, K, H)[table_YP]
    exact_YWKP = sum(
        np.einsum("YWKH,YPKH->YWKP", np.float64(part), pages_YPSKH[:, :, sign])
        for sign, part in enumerate(signed)
    )
    is_counted = np.broadcast_to(is_counted_YP[:, None, None], exact_YWKP.shape)
    size_YWKP = sum(
        np.einsum("YWKH,YPKH->YWKP", np.abs(np.float64(part)), np.abs(pages_YPSKH[:, :, sign]))
        for sign, part in enumerate(signed)
    )
    is_nan = np.isnan(exact_YWKP)
    np.testing.assert_array_equal(np.isnan(bounds_YWKP)[is_counted], is_nan[is_counted])
    # Both parts follow one another in a sum of 2 H terms, which may be off by H 2^-23.
    is_close = np.abs(bounds_YWKP - exact_YWKP) <= case.width * 2**-23 * size_YWKP
    assert is_close[is_counted & ~is_nan].all()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_pages(name):
    check_bounds(BOUNDS[name], (0, 1, 150, 64), 0)


@pytest.mark.long
@pytest.mark.parametrize("name", BOUNDS)
def test_500_random_batches_of_bounds(name):
    for seed in range(1, 168):
        counts = np.random.default_rng(seed).integers(0, 151, 2)
        check_bounds(BOUNDS[name], counts.tolist(), seed)


class Chosen(NamedTuple):
    """Queries that read some tokens, or pages of each KV head, of a row's cache."""

    heads: tuple[int, int]  # N, K
    widths: tuple[int, int]  # of keys and values; these are a part of the keys where widths differ
    tokens: int  # W
    page_tokens: int
    max_chosen: int
    dtype: str = "bfloat16"
    num_splits: int | None = None

    @property
    def is_latent(self):
        return self.widths[0] != self.widths[1]


CHOSEN = {
    "tokens of latents": Chosen((16, 1), (192, 128), 1, 64, 200),
    "tokens, two tiles of heads, drafts": Chosen((96, 1), (192, 128), 2, 64, 100, "float16", 2),
    "deepseek-v3.2": Chosen((16, 1), (576, 512), 1, 64, 130),
    "pages of each head": Chosen((8, 2), (64, 64), 1, 64, 3),
    "large pages, drafts": Chosen((6, 3), (64, 64), 3, 128, 2, "float16", 2),
}


def _attend(case, interpret, q_YWNH, pages, rectangle, index_YWKJ, count_YW):
    (N, K), (H, V), table_YP = case.heads, case.widths, rectangle.tables[0]
    if case.is_latent:
        table = chosen.single_entries(table_YP, index_YWKJ[:, :, 0], case.page_tokens)
        pages = chosen.as_single_entries(pages)
    else:
        table = chosen.entries(table_YP, index_YWKJ, case.page_tokens)
    out = gpu.attend_pages(
        q_YWNH.reshape(-1, 1, N, H), pages, chosen.each_query(rectangle, table, count_YW), 0,
        PageFormat(K, H, V, case.is_latent, case.dtype), num_splits=case.num_splits,
        interpret=interpret,
    )  # fmt: skip
    return out.reshape(*q_YWNH.shape[:3], V)


def check_chosen(case, lengths, seed, interpret=HOPPER):
    """Random choices, of short rows all that they have."""
    generator = np.random.default_rng(seed)
    (N, K), (H, V), W, page_tokens = case.heads, case.widths, case.tokens, case.page_tokens
    S, Y, dtype = 512, len(lengths), jnp.dtype(case.dtype)
    unit = 1 if case.is_latent else page_tokens
    page_format = PageFormat(K, H, V, case.is_latent, case.dtype)
    q_YWNH = (generator.standard_normal((Y, W, N, H)) * H**-0.5).astype(dtype)
    rows_YSX = generator.standard_normal((Y, S, page_format.row_width)).astype(dtype)
    position_YW = np.maximum(np.array(lengths)[:, None] - W + np.arange(W), 0).astype(np.int32)
    valid_YW = np.arange(W) < np.array(lengths)[:, None]
    pages, table_YP = _in_pages(rows_YSX, page_tokens, generator, page_format.values)
    index_YWKJ = np.full((Y, W, K, case.max_chosen), S // unit, np.int32)
    count_YW = np.zeros((Y, W), np.int32)
    expected, size = np.zeros((2, Y, W, N, V))
    for y, w in zip(*np.nonzero(valid_YW), strict=True):
        last = position_YW[y, w] // unit  # which is always read
        count = min(case.max_chosen, last + 1)
        count_YW[y, w] = (count - 1) * unit + position_YW[y, w] % unit + 1
        for head in range(K):
            picked = generator.permutation(last)[: count - 1]
            index_YWKJ[y, w, head, :count] = np.sort([*picked, last])
            read = (index_YWKJ[y, w, head, :count, None] * unit + np.arange(unit)).ravel()
            row_SX = np.float64(rows_YSX[y, read[: count_YW[y, w]]])
            key_SH = row_SX[:, head * H : (head + 1) * H]
            start = page_format.values.start + head * V
            group = slice(head * N // K, (head + 1) * N // K)
            scores = np.float64(q_YWNH[y, w, group]) @ key_SH.T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            expected[y, w, group] = weights @ row_SX[:, start : start + V]
            size[y, w, group] = weights @ np.abs(row_SX[:, start : start + V])
    rectangle = Rectangle(np.arange(Y), position_YW, valid_YW, (table_YP,))

    with blocks_in_order():  # of splits
        out_YWNV = _computed(
            _attend, case, interpret, q_YWNH, pages, rectangle, index_YWKJ, count_YW
        )
    _check_attended(case, out_YWNV, expected, size, valid_YW)


_LATER = "tokens, two tiles of heads, drafts", "large pages, drafts"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.long if name in _LATER else ()) for name in CHOSEN
])  # fmt: skip
def test_attention_to_what_queries_choose(name):
    check_chosen(CHOSEN[name], (0, 1, 70, 400), 0)


@pytest.mark.long
@pytest.mark.parametrize("name", CHOSEN)
def test_500_random_choices(name):
    for seed in range(1, 101):
        lengths = np.random.default_rng(seed).integers(0, 512, 2)
        check_chosen(CHOSEN[name], lengths.tolist(), seed)


class Stretches(NamedTuple):
    """Queries over the newest tokens, one by one, and over entries of the past."""

    num_heads: int
    width: int  # of keys, which are the values, too
    tokens: int  # W
    entry_rows: int  # of a page of entries
    window: int = 100
    dtype: str = "bfloat16"
    num_splits: int | None = None


STRETCHES = {
    "deepseek-v4": Stretches(64, 512, 1, 32),
    "entries alone in their pages, drafts": Stretches(16, 128, 3, 1, dtype="float16", num_splits=2),
}


def _attend_stretches(case, interpret, q_YWNC, stretches, valid_YW, sinks_N):
    page_format = PageFormat(1, case.width, case.width, True, case.dtype)
    return gpu_stretches.attend_stretches(
        q_YWNC, stretches, valid_YW, page_format, Options(sinks_N=sinks_N),
        num_splits=case.num_splits, interpret=interpret,
    )  # fmt: skip


def check_stretches(case, lengths, seed, interpret=HOPPER):
    """What no query sees is NaN, in values, too."""
    generator, dtype, C = np.random.default_rng(seed), jnp.dtype(case.dtype), case.width
    N, W, Y, S = case.num_heads, case.tokens, len(lengths), 256
    valid_YW = np.arange(W) < np.array(lengths)[:, None]
    last_YW = np.maximum(np.array(lengths)[:, None] - W + np.arange(W), 0).astype(np.int32)
    first_YW = np.maximum(last_YW - case.window + 1, 0)
    entry_YW = (last_YW + 1) // 4 - 1  # -1: none
    q_YWNC = (generator.standard_normal((Y, W, N, C)) * C**-0.5).astype(dtype)
    sinks_N = np.float32(generator.standard_normal(N))
    stretches, rows = [], []
    for first, last, page_tokens in ((first_YW, last_YW, 64), (None, entry_YW, case.entry_rows)):
        row_YSC = generator.standard_normal((Y, S, C)).astype(dtype)
        row_YSC[np.arange(S) > last.max(1)[:, None]] = np.nan
        pages, table_YP = _in_pages(row_YSC, page_tokens, generator)
        stretches.append(Stretch(pages, table_YP, MaskBounds(last, first)))
        rows.append(row_YSC)
    arguments = q_YWNC, tuple(stretches), valid_YW, sinks_N
    with blocks_in_order():  # of splits
        out_YWNC = _computed(_attend_stretches, case, interpret, *arguments)
    expected, size = np.zeros((2, Y, W, N, C))
    for y, w in zip(*np.nonzero(valid_YW), strict=True):
        near = rows[0][y, first_YW[y, w] : last_YW[y, w] + 1]
        read_SC = np.float64(np.concatenate([near, rows[1][y, : entry_YW[y, w] + 1]]))
        scores = np.concatenate(
            [np.float64(q_YWNC[y, w]) @ read_SC.T, np.float64(sinks_N[:, None])], axis=1
        )
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights = (weights / weights.sum(1, keepdims=True))[:, :-1]
        expected[y, w], size[y, w] = weights @ read_SC, weights @ np.abs(read_SC)
    _check_attended(case, out_YWNC, expected, size, valid_YW)


@pytest.mark.parametrize("name", STRETCHES)
def test_attention_to_tokens_and_entries(name):
    check_stretches(STRETCHES[name], (0, 3, 250), 0)


@pytest.mark.long
@pytest.mark.parametrize("name", STRETCHES)
def test_500_random_batches_of_tokens_and_entries(name):
    for seed in range(1, 251):
        lengths = np.random.default_rng(seed).integers(0, 257, 2)
        check_stretches(STRETCHES[name], lengths.tolist(), seed)
