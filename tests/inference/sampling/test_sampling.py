"""Filters against transformers' processors in numpy, draws against their exact distribution."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from inference.request import FIELDS, MAX_STOP_IDS, SamplingParams
from inference.sampling import gumbel, parameters, sampler
from inference.scheduling.sequence import Sequence
from layers import topk
from tests import compiling

ROWS = 32  # most tests fill up to as many, so that a vocabulary compiles once

pytestmark = pytest.mark.quick_code


def _sample(logits_QV, *others):
    return sampler.sample(logits_QV, topk.summarize(logits_QV), *others)


sample = compiling.jit(_sample)


@dataclasses.dataclass
class Request:
    """What one row asks for, with counts and a grammar mask beside it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: tuple[int, int] = (1, 2)
    prompt_length: int = 10
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    grammar_ids: tuple[int, ...] | None = None


def pack(requests: list[Request], vocab: int):
    """Device parameters and grammar masks of the requests, one row each."""
    rows = []
    for request in requests:
        row = parameters.neutral_row(vocab)
        row.stop_token_ids[: len(request.stop_token_ids)] = request.stop_token_ids
        for i, pair in enumerate(request.bias):
            row.bias_ids[i], row.bias_values[i] = pair
        own, asked = ({f.name for f in dataclasses.fields(x)} for x in (row, Request))
        plain = own & asked - {"stop_token_ids"}
        values = {n: np.asarray(getattr(request, n), getattr(row, n).dtype) for n in plain}
        allowed = parameters.pack_mask(vocab, request.allowed_token_ids, request.banned_token_ids)
        rows.append(dataclasses.replace(row, allowed=allowed, **values))
    masks = np.stack([parameters.pack_mask(vocab, r.grammar_ids, ()) for r in requests])
    return jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *rows), jnp.asarray(masks)


def tile(tree, rows: int):
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), tree)


def peaked(rng, rows: int, vocab: int, scale: float = 3.0) -> np.ndarray:
    return (rng.normal(size=(rows, vocab)) * scale).astype(np.float32)


# --- transformers' logits processors, in numpy ----------------------------------------------------


def reference_edit(x, request: Request, position: int, counts=None) -> np.ndarray:
    x = x.astype(np.float64)
    banned = set(request.banned_token_ids)
    if position - request.prompt_length < request.min_tokens:
        banned |= set(request.stop_token_ids)
    for ids in (request.allowed_token_ids, request.grammar_ids):
        banned |= set(range(x.size)) - set(range(x.size) if ids is None else ids)
    for token, value in request.bias:
        x[token] += value
    if counts is not None:
        seen = counts.sum(0) > 0
        factor = request.repetition_penalty
        x[seen] = np.where(x < 0, x * factor, x / factor)[seen]
        x -= request.presence_penalty * (counts[1] > 0) + request.frequency_penalty * counts[1]
    x[sorted(banned)] = -np.inf
    return x


def reference_warp(x, request: Request) -> np.ndarray:
    """Filters from the temperature on; removed logits are -inf, equals of kept ones stay."""
    x = x / request.temperature
    if 0 < request.top_k < x.size:
        x = np.where(x < np.sort(x)[-request.top_k], -np.inf, x)
    if request.top_p < 1:
        order = np.argsort(x, kind="stable")
        removed = np.cumsum(softmax(x)[order]) <= 1 - request.top_p
        removed[-1:] = False
        x = np.where(x < x[order][~removed].min(), -np.inf, x)
    if request.min_p > 0:
        x = np.where((p := softmax(x)) < request.min_p * p.max(), -np.inf, x)
    if request.epsilon_cutoff > 0:
        p = softmax(x)
        x = np.where((p < request.epsilon_cutoff) & (p < p.max()), -np.inf, x)
    return x


def softmax(x) -> np.ndarray:
    return (weights := np.exp(x - x.max())) / weights.sum()


softmax_rows = functools.partial(np.apply_along_axis, softmax, -1)


# --- what the device keeps ------------------------------------------------------------------------


@compiling.jit
def floors(logits_QV, own, position_Q, counts, mask_QX):
    """(edited, scaled, candidate floor, is open, row floor)."""
    _, edit = sampler._edits(own, position_Q, counts, mask_QX, logits_QV.shape[1])
    x_QV = edit(logits_QV)
    padded_QV, maxima_QG = topk.pad_to_groups(x_QV), topk.summarize(x_QV).maxima_QG
    values_QJ, _ = topk.top_n(padded_QV, maxima_QG, sampler._CANDIDATES)
    by_candidates, is_open = sampler._candidate_floor(padded_QV, values_QJ, own)
    by_rows = sampler._row_floor(padded_QV, own)
    return x_QV, sampler._scale(x_QV, own), by_candidates, is_open, by_rows


def check_support(x, requests, counts=None, position: int = 12) -> np.ndarray:
    """Both ways to the floor keep what the reference keeps; returns which rows are open."""
    scaled, *found, possible, edited = support(x, requests, counts, position)
    by_candidates, is_open, by_rows = found
    for q, request in enumerate(requests):
        row_counts = None if counts is None else counts[q]
        expected = reference_edit(x[q], request, position, row_counts)
        np.testing.assert_allclose(edited[q], expected, rtol=1e-5, atol=1e-5)
        kept = np.isfinite(reference_warp(expected, request))
        np.testing.assert_array_equal((scaled[q] >= by_rows[q]) & possible[q], kept, f"rows {q}")
        if not is_open[q]:
            actual = (scaled[q] >= by_candidates[q]) & possible[q]
            np.testing.assert_array_equal(actual, kept, f"candidates {q}")
            assert kept.sum() <= sampler._CANDIDATES
    return is_open


def support(x, requests, counts, position):
    """`floors` of the rows, and which logits are finite."""
    rows = len(requests)
    result = floors(*fill(x, requests, counts, position))
    edited, scaled, by_candidates, is_open, by_rows = (np.asarray(leaf)[:rows] for leaf in result)
    return scaled, by_candidates, is_open, by_rows, np.isfinite(edited), edited


def fill(x, requests, counts=None, position=12):
    """Arguments of `sample`, filled up to `ROWS` rows of greedy zeros."""
    (rows, vocab), missing = x.shape, ROWS - len(x)
    own, masks = pack([*requests, *[Request(0.0)] * missing], vocab)
    counts = np.zeros((rows, 2, vocab), np.uint16) if counts is None else counts
    counts = np.pad(counts, ((0, missing), (0, 0), (0, 0)))
    position = np.pad(np.broadcast_to(position, rows), (0, missing)).astype(np.int32)
    return np.pad(x, ((0, missing), (0, 0))), own, position, counts, masks


def draw_filled(x, requests, counts=None, position=12) -> np.ndarray:
    return np.asarray(sample(*fill(x, requests, counts, position)))[: len(x)]


FILTERS = [
    *[Request(top_k=k) for k in (0, 1, 2, 64, 65, 71, 72, 73, 130, 131, 10**9)],
    *[Request(top_p=p) for p in (1e-6, 0.3, 0.9, 0.999, 1.0)],
    *[Request(min_p=p) for p in (1e-9, 0.05, 0.5, 1.0)],
    *[Request(epsilon_cutoff=p) for p in (1e-9, 3e-3, 0.05, 1.0)],
    Request(3.0, 50, 0.95, 0.01, 0.02), Request(0.3, 20, epsilon_cutoff=0.01),
    Request(temperature=0.3, top_p=0.9),
    Request(temperature=20.0, top_p=0.9),
    Request(temperature=3.0, top_k=50, top_p=0.95),
    Request(temperature=3.0, top_k=100, top_p=0.95, min_p=0.01),
    Request(temperature=2.0, top_k=100, top_p=0.05),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [40, 131, 300])
def test_each_filter_keeps_what_transformers_keeps(vocab):
    x = peaked(np.random.default_rng(vocab), len(FILTERS), vocab)
    is_open = check_support(x, FILTERS)
    if vocab > sampler._CANDIDATES:
        assert is_open.any() and not is_open.all()
    else:
        assert not is_open.any()


def test_filters_on_a_real_vocabulary():
    requests = [
        Request(0.8, 50, 0.95), Request(1.0, 64, 0.95), Request(0.8, 0, 0.9), Request(3.0, 0, 0.95),
        Request(1.0, 2000), Request(1.0, 1000, 0.5, 0.001), Request(1.0, 0, 1.0, 0.1), Request(),
    ]  # fmt: skip
    x = peaked(np.random.default_rng(0), len(requests), 49_152)
    is_open = check_support(x, requests)
    np.testing.assert_array_equal(is_open[[0, 1, 3, 4, 7]], [False, False, True, True, True])


def test_equals_of_the_threshold_stay():
    x = np.full((6, 300), -4.0, np.float32)
    x[:, 7] = 3.0
    x[:, 100:110] = 2.0  # candidates
    x[3:, 120:250] = 2.0  # more than candidates
    filters = [Request(top_k=4), Request(top_p=0.5), Request(min_p=float(np.exp(-1.0)) - 1e-6)]
    is_open = check_support(x, filters + filters)
    np.testing.assert_array_equal(is_open, [False] * 3 + [True] * 3)
    check_support(np.zeros((3, 131), np.float32), [Request(top_k=1), Request(top_p=0.2), Request()])


def test_zeros_of_both_signs_are_equal():
    x = np.full((1, 300), -1.0, np.float32)
    x[0, :100], x[0, 100:200] = 0.0, -0.0
    assert check_support(x, [Request(top_k=50)])[0]


unit = st.floats(0.01, 1.0)
requests = st.builds(
    Request,
    temperature=st.floats(0.1, 5.0),
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), unit),
    min_p=st.one_of(st.just(0.0), unit),
    epsilon_cutoff=st.one_of(st.just(0.0), st.floats(1e-4, 0.3)),
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_tokens=st.sampled_from((0, 1, 2, 5)),
    stop_token_ids=st.lists(st.integers(0, 299), max_size=3, unique=True).map(tuple),
    bias=st.lists(st.tuples(st.integers(0, 299), st.floats(-9, 9)), max_size=4).map(tuple),
    banned_token_ids=st.lists(st.integers(0, 299), max_size=9).map(tuple),
    allowed_token_ids=st.one_of(st.none(), st.just(tuple(range(5, 290)))),
    grammar_ids=st.one_of(st.none(), st.just(tuple(range(0, 300, 4)))),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(requests, min_size=ROWS, max_size=ROWS), st.integers(0, 2**32 - 1))
def test_filters_apply_in_order(many, seed):
    rng = np.random.default_rng(seed)
    x = peaked(rng, ROWS, 300, 2.0)
    counts = rng.poisson(0.3, size=(ROWS, 2, 300)).astype(np.uint16)
    scaled, by_candidates, is_open, by_rows, possible, _ = support(x, many, counts, 12)
    ids = [draw_filled(x, many, counts, position) for position in range(12, 15)]
    actual = (scaled >= np.where(is_open, by_rows, by_candidates)[:, None]) & possible
    for q, request in enumerate(many):
        kept = np.isfinite(reference_warp(reference_edit(x[q], request, 12, counts[q]), request))
        # In float32 a token at the edge of the nucleus may fall on either side of it.
        assert (actual[q] ^ kept).sum() <= 1
        assert all(actual[q][row[q]] for row in ids)


# --- mask, bias, penalties ------------------------------------------------------------------------


def test_penalties_follow_transformers():
    rng = np.random.default_rng(3)
    requests = [
        Request(repetition_penalty=1.7),
        Request(repetition_penalty=0.6, top_k=20),
        Request(presence_penalty=1.5, frequency_penalty=0.25),
        Request(repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=-0.5, top_p=0.8),
        Request(repetition_penalty=2.0, bias=tuple((token, -3.0) for token in range(32))),
    ]
    counts = rng.poisson(0.2, size=(5, 2, 131)).astype(np.uint16)
    check_support(peaked(rng, 5, 131), requests, counts)


def test_counts_of_any_integer_type():
    x = np.zeros((1, 131), np.float32)
    x[0, [4, 9]] = 5.0, 4.0
    counts = np.zeros((1, 2, 131), np.uint16)
    counts[0, 1, 4] = 200
    request = Request(temperature=0.0, frequency_penalty=0.1)
    assert draw_filled(x, [request])[0] == 4
    assert draw_filled(x, [request], counts)[0] == 9
    own, _ = pack([request], 131)

    def edit(own, counts, logits_QV):
        return sampler._edits(own, np.array([9]), counts, None, 131)[1](logits_QV)

    for dtype in (jnp.uint8, jnp.int32):
        edited = compiling.call(edit, own, counts.astype(dtype), x)
        np.testing.assert_allclose(edited[0, [4, 9]], [-15.0, 4.0], rtol=1e-6)


def test_stop_ids_are_banned_before_min_tokens():
    x = np.zeros((5, 131), np.float32)
    x[:, [0, 31, 32, 130]] = 9.0
    x[:, 77] = 5.0
    request = Request(
        temperature=0.0, min_tokens=3, stop_token_ids=(130, 0, 31, 32), prompt_length=10
    )
    ids = draw_filled(x, [request] * 5, position=np.arange(10, 15))
    np.testing.assert_array_equal(ids, [77, 77, 77, 0, 0])
    check_support(x, [dataclasses.replace(request, temperature=1.0)] * 5, position=11)


def test_greedy_rows_take_the_argmax_after_the_bias():
    x = peaked(np.random.default_rng(1), 3, 131)
    requests = [
        Request(temperature=0.0, top_k=3, top_p=0.1, bias=((130, 40.0), (2, -3.0))),
        Request(temperature=0.0, bias=((5, 20.0), (5, 20.0), (6, 39.0))),
        Request(temperature=0.0),
    ]
    expected = [130, 5, x[2].argmax()]
    np.testing.assert_array_equal(draw_filled(x, requests), expected)
    beside = draw_filled(np.concatenate([x, x[:1]]), [*requests, Request()])  # a row that draws
    np.testing.assert_array_equal(beside[:3], expected)


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_tiny_temperature_draws_the_argmax(top_p):
    x = peaked(np.random.default_rng(1), 4, 131)
    requests = [Request(t, 0, top_p) for t in (1e-3, 1e-6, 1e-30, 1e-45)]
    np.testing.assert_array_equal(draw_filled(x, requests), x.argmax(-1))


def test_a_bias_does_not_revive_a_banned_token():
    request = Request(banned_token_ids=(3,), bias=((3, 100.0),), grammar_ids=(3, 8))
    assert draw_filled(np.zeros((1, 131), np.float32), [request])[0] == 8


@pytest.mark.parametrize("vocab", [40, 131, 300])
def test_samples_stay_in_mask_and_vocabulary(vocab):
    rng = np.random.default_rng(vocab)
    allowed = tuple(rng.choice(vocab, vocab // 2, replace=False).tolist())
    x = np.zeros((ROWS, vocab), np.float32)
    for top_p in (0.9, 1.0):
        whole = Request(5.0, 0, top_p)
        for field in ("allowed_token_ids", "grammar_ids", None):
            request = whole if field is None else dataclasses.replace(whole, **{field: allowed})
            some = [draw_filled(x, [request] * ROWS, None, np.arange(ROWS) + i) for i in (0, ROWS)]
            ids, expected = (
                set(np.concatenate(some).tolist()),
                set(range(vocab) if field is None else allowed),
            )
            assert ids <= expected and len(ids) > 0.4 * min(len(expected), 2 * ROWS)


def test_a_row_without_permitted_tokens_ends():
    x = peaked(np.random.default_rng(1), 3, 131)
    x[2] = -np.inf
    requests = [
        Request(stop_token_ids=(9, 4)), Request(temperature=0.0), Request(top_p=0.9, top_k=9)
    ]  # fmt: skip
    *arguments, masks = fill(x, requests)
    masks = jnp.where(jnp.arange(ROWS)[:, None] < 2, jnp.uint32(0), masks)
    np.testing.assert_array_equal(sample(*arguments, masks)[:3], [9, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_rows_that_are_not_finite_are_reported_and_harm_no_other(bad):
    """x86 makes NaN of both signs: a negative one is less than the padding of its row."""
    x = peaked(np.random.default_rng(1), 4, 130)
    broken = x.copy()
    broken[1, 60], broken[2] = bad, bad
    requests = [Request(), Request(), Request(top_k=200, top_p=0.9), Request(top_p=0.5)]
    ids, healthy = draw_filled(broken, requests), draw_filled(x, requests)
    np.testing.assert_array_equal(ids[[0, 3]], healthy[[0, 3]])
    assert (ids < 130).all() and (ids >= 0).all()
    _, finite = sampler.log_probs(broken, topk.summarize(broken), ids)
    np.testing.assert_array_equal(finite, [True, False, False, True])


def test_pack_mask():
    words = parameters.pack_mask(40, (0, 31, 32, 39), (31,))
    assert words.dtype == np.uint32 and words.shape == (2,)
    bits = words[np.arange(40) // 32] >> (np.arange(40) % 32) & 1
    np.testing.assert_array_equal(np.flatnonzero(bits), [0, 32, 39])
    np.testing.assert_array_equal(parameters.pack_mask(40, None, ()), [2**32 - 1] * 2)
    for allowed, banned in (((40,), ()), (None, (-1,))):
        with pytest.raises(ValueError, match="is not in 0 .. 39"):
            parameters.pack_mask(40, allowed, banned)
    for allowed, banned in (((), ()), ((3,), (3,))):
        with pytest.raises(ValueError, match="leave no token"):
            parameters.pack_mask(40, allowed, banned)


def test_neutral_rows_change_nothing():
    state = parameters.init(ROWS, 131)
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(state))
    row = parameters.neutral_row(131)
    for leaf, value in zip(jax.tree.leaves(state), jax.tree.leaves(row), strict=True):
        assert leaf.dtype == value.dtype and leaf.shape[1:] == value.shape
    row.stop_token_ids[:] = row.allowed[:] = 1  # owned by the caller
    x = peaked(np.random.default_rng(1), ROWS, 131)
    np.testing.assert_array_equal(sample(x, state, *fill(x, [Request()] * ROWS)[2:]), x.argmax(-1))


def test_a_request_as_a_row():
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.75, frequency_penalty=-0.5, logit_bias=((7, 1.5), (9, -2.0)),
        banned_token_ids=(8,), min_tokens=2, stop_token_ids=(5, 4),
    )  # fmt: skip
    sequence = Sequence(1, params, [1, 2, 3], 2, frozenset({6}), seed=(7 << 32) + 9)
    row = parameters.request_row(sequence, 40)
    neutral = parameters.neutral_row(40)
    for name in (name for name, field in FIELDS.items() if field.dtype):
        assert getattr(row, name) == getattr(params, name)
    assert row.seed.tolist() == [7, 9] and (row.prompt_length, row.min_tokens) == (2, 2)
    assert row.stop_token_ids.tolist() == [4, 5, 6] + [-1] * (MAX_STOP_IDS - 3)
    assert row.bias_ids[:3].tolist() == [7, 9, -1] and row.bias_values[:3].tolist() == [1.5, -2, 0]
    np.testing.assert_array_equal(row.allowed, parameters.pack_mask(40, None, (8,)))
    chex.assert_trees_all_equal_shapes_and_dtypes(row, neutral)


# --- the law --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("draws",))
def draw(x_1V, own, draws: int):
    """`draws` samples of one row at successive positions, 64 at a time."""
    own = tile(own, 64)

    def some(position_Q):
        return _sample(jnp.repeat(x_1V, 64, axis=0), own, position_Q)

    return jax.lax.map(some, jnp.arange(draws).reshape(-1, 64)).ravel()


LAWS = [
    Request(0.8, 50, 0.95),  # from candidates
    Request(1.5, 0, 1.0),  # from the whole row
    Request(4.0, 100, 0.95, 0.02),  # both bisections
    Request(1.0, 0, 1.0, 0.05),
    Request(0.7, 0, 0.8, bias=((3, 2.0),), banned_token_ids=(7,)),
]


@pytest.mark.parametrize("request_", LAWS)
def test_samples_follow_the_law(request_):
    x = peaked(np.random.default_rng(5), 1, 131, 1.5)
    own, _ = pack([request_], 131)
    draws = 19_968
    observed = np.bincount(np.asarray(draw(x, own, draws)), minlength=131)
    law = softmax(reference_warp(reference_edit(x[0], request_, 0), request_))
    assert observed[law == 0].sum() == 0
    order = np.argsort(-law)
    expected, observed = draws * law[order], observed[order]
    common = max(int((expected >= 8).sum()), 1)
    pool = lambda counts: np.append(counts[:common], counts[common:].sum())  # noqa: E731
    expected, observed = pool(expected), pool(observed)
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4


@pytest.mark.quick_code(False)
@pytest.mark.parametrize("vocab", [300, pytest.param(49_152, marks=pytest.mark.long)])
def test_candidates_and_whole_row_draw_the_same(vocab):
    x = peaked(np.random.default_rng(7), 16, vocab)
    requests = [Request(0.8, 50, 0.95, seed=(q, 0)) for q in range(8)]
    requests += [Request(0.7, 0, 0.8, seed=(q, 0)) for q in range(8)]
    arguments = logits, own, position, *_ = fill(x, requests)
    assert not floors(*arguments)[3][:8].any()
    keys = gumbel.row_keys(own.seed, position)
    whole = compiling.jit(sampler._sample_rows)(topk.pad_to_groups(jnp.asarray(logits)), own, keys)
    np.testing.assert_array_equal(sample(*arguments)[:16], whole[:16])


@pytest.mark.quick_code(False)
def test_a_row_depends_on_itself_only():
    rng, rows, vocab = np.random.default_rng(11), 9, 300
    x = peaked(rng, rows, vocab)
    requests = [
        Request(0.8, 50, 0.95), Request(0.8, 50, 0.95), Request(1.0), Request(1.0, 200, 0.9),
        Request(0.0), Request(9.0, 0, 0.9), Request(1.0, 0, 1.0, 0.05),
        Request(1.0, 9, banned_token_ids=(4,), repetition_penalty=1.3, bias=((6, 2.0),)),
        Request(0.8, 0, 0.9),
    ]  # fmt: skip
    requests = [dataclasses.replace(r, seed=(q, q)) for q, r in enumerate(requests)]
    counts = rng.poisson(0.2, size=(rows, 2, vocab)).astype(np.uint16)
    position = np.arange(rows) * 7
    arguments = fill(x, requests, counts, position)
    is_open = np.asarray(floors(*arguments)[3])
    assert not is_open[0] and is_open[3] and is_open[5]
    together = np.asarray(sample(*arguments))[:rows]
    for q in range(rows):
        alone = jax.tree.map(lambda leaf, q=q: leaf[q : q + 1], arguments)
        assert sample(*alone)[0] == together[q]
        among_greedy = draw_filled(
            x[q : q + 1], requests[q : q + 1], counts[q : q + 1], position[q]
        )
        assert among_greedy[0] == together[q]
    order = rng.permutation(ROWS)
    permuted = np.asarray(sample(*jax.tree.map(lambda leaf: leaf[order], arguments)))
    np.testing.assert_array_equal(permuted[np.argsort(order)][:rows], together)


@pytest.mark.quick_code(False)
@pytest.mark.parametrize("vocab, top_k", [(300, 0), (300, 50)])
def test_an_edge_of_the_nucleus_does_not_move_with_the_rows(vocab, top_k):
    """top_p is exactly the mass of the best tokens: the last bit of a sum decides on the next."""
    x = peaked(np.random.default_rng(0), ROWS, vocab)
    best = np.sort(x.astype(np.float64))[:, ::-1][:, : top_k or vocab]
    mass = np.cumsum(softmax_rows(best), axis=-1).astype(np.float32)
    for j in range(1, 20):
        requests = [Request(1.0, top_k, float(p), seed=(j, j)) for p in mass[:, j]]
        arguments = fill(x, requests, position=np.arange(ROWS))
        some = jax.tree.map(lambda leaf: leaf[:8], arguments)
        for program in (floors, sample):
            whole, found = program(*arguments), program(*some)
            chex.assert_trees_all_equal(found, jax.tree.map(lambda leaf: leaf[:8], whole))


def test_seeds_name_the_stream():
    x = np.zeros((ROWS, 131), np.float32)
    drawn = {}
    for seed in [(1, 2), (2, 1), (1, 3)]:
        requests = [Request(seed=seed)] * ROWS
        drawn[seed] = draw_filled(x, requests, position=np.arange(ROWS))
        again = draw_filled(x, requests, position=np.arange(ROWS))
        np.testing.assert_array_equal(drawn[seed], again)
    for other in ((2, 1), (1, 3)):
        assert (drawn[1, 2] == drawn[other]).mean() < 0.2


# --- noise ----------------------------------------------------------------------------------------


@compiling.jit
def noise(seeds_Q2, positions_Q, ids_J):
    return gumbel.uniform(gumbel.row_keys(seeds_Q2, positions_Q), ids_J[None])


def uniforms(seeds, positions, ids) -> np.ndarray:
    ids, positions = np.asarray(ids, np.int32), np.asarray(positions, np.int32)
    return np.asarray(noise(np.asarray(seeds, np.uint32), positions, ids))


@pytest.mark.parametrize("axis", ["ids", "positions", "low seeds", "high seeds"])
def test_noise_is_uniform_and_independent_of_its_neighbours(axis):
    n = 60_000
    steps, zeros = np.arange(n), np.zeros(n, np.int64)
    if axis == "ids":
        u = uniforms([[3, 4]], [5], steps)[0]
    elif axis == "positions":
        u = uniforms(np.tile([3, 4], (n, 1)), steps, [9])[:, 0]
    else:
        pair = (steps, zeros) if axis == "high seeds" else (zeros, steps)
        u = uniforms(np.stack(pair, -1), zeros, [9])[:, 0]
    assert u.min() > 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    for lag in (1, 2, 32, 128):
        assert abs(np.corrcoef(u[lag:], u[:-lag])[0, 1]) < 4.5 / np.sqrt(n)
        cells = np.histogram2d(u[lag:], u[:-lag], bins=8, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-4


def test_noise_of_neighbouring_rows_is_independent():
    ids = np.arange(20_000)
    seeds = [[0, 0], [1, 0], [0, 1], [0, 0], [1 << 31, 0], [0, 1 << 31]]
    u = uniforms(seeds, [0, 0, 0, 1, 0, 0], ids)
    correlation = np.corrcoef(u)
    assert np.abs(correlation - np.eye(len(seeds))).max() < 4.5 / np.sqrt(ids.size)


def test_gumbel_noise_follows_its_law():
    keys = gumbel.row_keys(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32))
    g = np.asarray(gumbel.gumbel(keys, jnp.arange(200_000)[None]))
    assert np.isfinite(g).all()
    assert stats.kstest(g[0, :50_000], "gumbel_r").pvalue > 1e-4


# --- log-probabilities ----------------------------------------------------------------------------


def test_log_probs():
    x = peaked(np.random.default_rng(2), 4, 300)
    expected = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    ids = np.array([0, 299, 7, 8])
    summary = compiling.call(topk.summarize, x)
    logp, finite = compiling.call(sampler.log_probs, x, summary, ids)
    np.testing.assert_allclose(logp, expected[np.arange(4), ids], atol=1e-5)
    assert finite.all()
    values, top_ids = compiling.call(sampler.top_log_probs, x, summary, n=3)
    np.testing.assert_array_equal(top_ids, np.argsort(-x, axis=-1)[:, :3])
    np.testing.assert_allclose(
        values, np.take_along_axis(expected, np.asarray(top_ids), -1), atol=1e-5
    )
    values, top_ids = sampler.top_log_probs(x, summary, 0)
    assert values.shape == (4, 0) and top_ids.shape == (4, 0) and top_ids.dtype == jnp.int32
