"""Rows beside products and attention: the native library against XLA's path and float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import norm, page_rows, rope, topk
from layers.backends import backends
from layers.kernels.cpu import rows
from layers.mixers.attention import packed_row
from layers.sparse.chosen import best
from tests.layers.native import instruction_set, need  # noqa: F401

_SIZES = [1, 5, 16, 33, 64, 100, 576, 1037]


def _drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def _alone(function, x, counts=(1, 2, 3, 7, 40)):
    """A row's bits do not depend on the rows beside it."""
    whole = jax.tree.map(np.asarray, jax.jit(function)(x))
    for count in counts:
        for part in (slice(count), slice(-count, None)):
            found = jax.jit(function)(x[part])
            chex.assert_trees_all_equal(found, jax.tree.map(lambda leaf: leaf[part], whole))  # noqa: B023


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_equal_float64(instruction_set, dtype, has_bias):  # noqa: F811
    for size in _SIZES:
        x = 3 * _drawn(size, 7, 5, size) + 1
        x[3, 2] = 0
        weight, bias = _drawn(1, size, dtype=dtype), _drawn(2, size, dtype=dtype)
        offset = 0.0 if has_bias else 1.0
        wide, exact = weight.astype(np.float64) + offset, x.astype(np.float64)
        if has_bias:
            exact = exact - exact.mean(-1, keepdims=True)
        exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3) * wide
        if has_bias:
            exact += bias.astype(np.float64)
        found = rows.norm(x, weight, bias if has_bias else None, 1e-3, offset)
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=1e-5)


def test_a_wide_bias_beside_narrow_weights_keeps_its_bits(instruction_set):  # noqa: F811
    x, weight, bias = _drawn(0, 4, 33), _drawn(1, 33, dtype="bfloat16"), _drawn(2, 33)
    wide = rows.norm(x, weight.astype(np.float32), bias, 1e-6)
    np.testing.assert_array_equal(rows.norm(x, weight, bias, 1e-6), wide)


def test_a_summary_has_xlas_gradient(instruction_set):  # noqa: F811
    x = _drawn(0, 3, 300)
    with backends.use(backends.CPU):
        found = jax.grad(lambda x: topk.summarize(x).total_Q.sum())(x)
    np.testing.assert_allclose(found, jax.nn.softmax(x), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_equal_float64(instruction_set, activation, dtype):  # noqa: F811
    for size in _SIZES:
        x = 6 * _drawn(size, 9, 2 * size)
        x[0, 0], x[1, 0], x[2, 0], x[3] = 1e4, -1e4, 0, -0.0
        g, up = np.split(x.astype(np.float64), 2, axis=-1)
        tanh = 1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
        act = g * np.exp(-np.logaddexp(0, -g)) if activation == "silu" else g * tanh / 2
        found = rows.gate(jnp.asarray(x), activation, dtype)
        assert found.shape == (9, size) and found.dtype == dtype
        near = dict(rtol=2e-6, atol=1e-5) if dtype == "float32" else dict(rtol=4e-3, atol=1e-5)
        np.testing.assert_allclose(found.astype(np.float32), act * up, **near)


def test_bfloat16_is_rounded_as_numpy_does(instruction_set):  # noqa: F811
    x = _drawn(0, 64, 200) * np.float32(10.0) ** np.arange(-30, 34)[:, None].astype(np.float32)
    wide = np.asarray(rows.gate(jnp.asarray(x), "silu", "float32"))
    narrow = np.asarray(rows.gate(jnp.asarray(x), "silu", "bfloat16"))
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    nan = jnp.full((1, 40), jnp.nan)
    assert np.isnan(np.asarray(rows.gate(nan, "silu", "bfloat16")).astype(np.float32)).all()


@pytest.mark.parametrize("vocab", [1, 40, 128, 131, 8192, 8200, 49_152, 70_001])
def test_a_summary_of_logits_equals_xlas(instruction_set, vocab):  # noqa: F811
    x = 9 * _drawn(vocab, 9, vocab)
    x[1] = np.round(x[1])
    x[2], x[3, vocab // 2 :] = -np.inf, -np.inf
    x[4] -= 300
    x[5], x[6, : vocab // 2] = 0, 0
    with backends.use(backends.CPU):
        found = topk.summarize(jnp.asarray(x))
    maxima, best, total = topk.summarize(jnp.asarray(x))
    np.testing.assert_array_equal(found.maxima_QG, maxima)
    np.testing.assert_array_equal(found.best_Q, best)
    np.testing.assert_allclose(found.total_Q, total, rtol=2e-6, atol=1e-5)


def test_a_summary_says_what_is_not_finite(instruction_set):  # noqa: F811
    x = _drawn(0, 5, 20_000)
    x[0, 9], x[1, 19_999], x[2, 8193] = np.nan, np.inf, -np.nan
    x[3] = -np.inf
    with backends.use(backends.CPU):
        found = topk.summarize(jnp.asarray(x))
    np.testing.assert_array_equal(np.isfinite(found.total_Q), [False] * 4 + [True])
    assert ((found.best_Q >= 0) & (found.best_Q < 20_000)).all()


@pytest.mark.parametrize("most", [1, 7, 64, 300])
@pytest.mark.parametrize("size", [300, 1032, 17_000])
def test_a_choice_is_xlas(instruction_set, size, most):  # noqa: F811
    """Of scores that are all different, of many equal ones, and of what is not finite."""
    generator, scores = np.random.default_rng(size), _drawn(0, 8, 2, size)
    scores[1], scores[2] = np.round(scores[1]), 0
    scores[3] *= generator.random((2, size)) < 0.5  # zeros of both signs
    for row, values in ((4, (np.nan, np.inf, -np.inf)), (5, (np.nan, np.inf))):
        for value in values:
            scores[row, :, generator.integers(0, size, size // 40)] = value
    share = np.array([1, 0.9, 0.5, 0.1, 1, 0.7, 0.01, 0])[:, None, None]
    is_open = generator.random(scores.shape) < share
    expected = best(jnp.asarray(scores), jnp.asarray(is_open), most)
    with backends.use(backends.CPU):
        found = jax.jit(best, static_argnums=2)(scores, is_open, most)
    for own, one in zip(found, expected, strict=True):
        assert own.dtype == one.dtype == jnp.int32
        np.testing.assert_array_equal(own, one)


def test_a_row_has_the_same_bits_in_any_company(instruction_set):  # noqa: F811
    weight = _drawn(1, 70)
    _alone(lambda x: rows.norm(x, weight, None, 1e-6), _drawn(0, 300, 70))
    _alone(lambda x: rows.gate(x, "silu", "bfloat16"), _drawn(0, 300, 140))
    _alone(rows.summarize, _drawn(0, 41, 9000))
    _alone(lambda x: rows.choose(x, x > 0, 30), _drawn(0, 60, 900))
    (made, (cos, sin), norms, (page, token), pages), sizes = _heads("bfloat16", 64, 32, True)
    heads = np.concatenate([made, cos, sin, page[:, None], token[:, None]], axis=1)
    ends = np.cumsum([made.shape[1], 32, 32, 1])

    def queries(x):
        made, cos, sin, page, token = jnp.split(x, ends, axis=1)
        place = page[:, 0].astype(jnp.int32), token[:, 0].astype(jnp.int32)
        return rows.append(made, (cos, sin), norms, place, pages, **sizes)[0]

    _alone(queries, heads, (1, 2, 7))


def _heads(dtype, width, pairs, has_norms, N=3, K=2, T=23):
    """What `rows.append` takes, of tokens in random places, every fourth of which is padding."""
    generator = np.random.default_rng(width)
    made = 2 * _drawn(width, T, (N + 2 * K) * width)
    turns = generator.uniform(0, 6.3, (T, pairs)).astype(np.float32)
    place = generator.permutation(np.arange(8, 8 * 9)).astype(np.int32)[:T]
    page, token = np.divmod(place, np.int32(8))
    page[::4] = 0
    pages = _drawn(3, 9, 8, 2 * K * width, dtype=dtype)
    pages = page_rows.encode(jnp.asarray(pages), jnp.zeros(0, page_rows.stored_dtype(dtype)))
    norms = (_drawn(1, width, dtype=dtype), _drawn(2, width, dtype=dtype)) if has_norms else None
    arrays = made, (np.cos(turns), np.sin(turns)), norms, (page, token), pages
    return arrays, dict(shape=(N, K, width), dtype=dtype, scale=0.3, eps=1e-3, offset=1.0)


def _by_xla(made, angles, norms, place, pages, *, shape, dtype, scale, eps, offset):
    (N, K, H), T = shape, len(made)
    q, k, v = jnp.split(made.reshape(T, -1, H), [N, N + K], axis=1)
    if norms is not None:
        q, k = (norm.rms_norm(x, w, eps, offset) for x, w in zip((q, k), norms, strict=True))
    q, k = (rope.rotate(jnp.asarray(x), *map(jnp.asarray, angles)) for x in (q, k))
    row = packed_row(k.astype(dtype), v.astype(dtype), False).reshape(T, -1)
    return (q * scale).astype(dtype), pages.at[place].set(page_rows.encode(row, pages))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("width, pairs", [(64, 32), (10, 5), (80, 16), (32, 0)])
def test_heads_are_turned_and_written_as_xla_does(instruction_set, dtype, width, pairs, has_norms):  # noqa: F811
    arrays, sizes = _heads(dtype, width, pairs, has_norms)
    qkv, page = arrays[0], arrays[3][0]
    qkv[1, -5], qkv[2, -7], qkv[3, -width] = np.nan, -np.inf, 3.4e38
    q, pages = rows.append(*arrays, **sizes)
    expected_q, expected = _by_xla(*arrays, **sizes)
    near = dict(rtol=2e-5, atol=1e-5) if dtype == "float32" else dict(rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(
        np.asarray(q, np.float32)[page > 0], np.asarray(expected_q, np.float32)[page > 0], **near
    )
    assert not np.asarray(q, np.float32)[page == 0].any()
    computed, reference = (np.asarray(page_rows.decode(x), np.float32) for x in (pages, expected))
    np.testing.assert_allclose(computed[1:], reference[1:], **near)
    np.testing.assert_array_equal(np.asarray(pages)[0], np.asarray(arrays[-1])[0])


def test_what_lies_outside_of_pages_is_written_nowhere():
    need()
    arrays, sizes = _heads("float32", 16, 8, False, T=4)
    place = np.array([9, 1, -1, 1], np.int32), np.array([0, 8, 0, -1], np.int32)
    q, pages = rows.append(*arrays[:3], place, arrays[4], **sizes)
    assert not np.asarray(q).any()
    np.testing.assert_array_equal(pages, arrays[4])


def test_pages_are_written_in_place():
    """Where they are donated; else what was given stays as it is."""
    need()
    (*others, pages), sizes = _heads("bfloat16", 16, 8, False)
    append = jax.jit(lambda pages: rows.append(*others, pages, **sizes)[1], donate_argnums=0)
    assert "copy(" not in append.lower(pages).compile().as_text()
    before = np.array(pages)
    rows.append(*others, pages, **sizes)
    np.testing.assert_array_equal(pages, before)


def test_zeros_are_zeros_where_memory_is_used_again():
    """The small ones lie within a page, the large ones between two."""
    need()
    for size in (1, 5000, 20_000_003):
        for _ in range(2):
            jax.block_until_ready(jnp.ones(size, jnp.uint8))
            assert not np.asarray(rows.zeros(jax.ShapeDtypeStruct((size,), jnp.uint8))).any()


def test_gradients_are_those_of_xlas_path(instruction_set):  # noqa: F811
    x, weight = _drawn(0, 4, 33), _drawn(1, 33)
    gradient = jax.grad(lambda x, w: jnp.sin(norm.rms_norm(x, w, 1e-6)).sum(), (0, 1))
    with backends.use(backends.CPU):
        found = gradient(x, weight)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, gradient(x, weight)
    )


def test_a_program_calls_the_kernels_it_chose():
    """One function, traced for both: jit keeps them apart."""
    need()
    run, x = jax.jit(lambda x: topk.summarize(norm.rms_norm(x, x[0], 1e-6))), _drawn(0, 4, 300)
    text = {}
    for chosen in (True, False, True):
        with backends.use(backends.CPU if chosen else None):
            text[chosen] = run.lower(x).as_text()
    assert text[True].count("ridgeline_norm") and text[True].count("ridgeline_summarize")
    assert "ridgeline" not in text[False]
