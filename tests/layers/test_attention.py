"""Attention over pages against a softmax in float64, and the whole mixer."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import keys_values
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Rope
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from inference.benchmark.kernels import attention_case
from layers import rope
from layers.kernels.attention import reference
from layers.kv_cache import Paged
from layers.mixers import attention
from layers.params import init
from layers.ragged import Ragged, Rectangle, contiguous
from layers.registry import StepContext
from tests import compiling
from tests.layers import paged_case
from tests.layers.paged_case import Sight

pytestmark = pytest.mark.quick_code

_HEADS = [(3, 1), (3, 3), (9, 3)]  # (N, K); elsewhere (4, 2)
_PATHS = {  # query tokens a row, deterministic
    "block-diagonal": (1, False),
    "block-diagonal, drafts": (3, False),
    "per head": (20, False),
    "deterministic, one token": (1, True),
    "deterministic, tiles": (20, True),
}

_MAIN_PATHS = ["block-diagonal", "per head", "deterministic, tiles"]


# --- attention over pages -------------------------------------------------------------------------


class _Case(paged_case.Case):
    def attend(self, window, deterministic, cap=None, sinks_N=None):
        program = _attend_pages(self.page_format, window, deterministic, cap)
        return np.asarray(program(*self.arguments, sinks_N=sinks_N))


@functools.cache
def _attend_pages(page_format, window, deterministic, cap=None):
    def attend(q_YWNH, pages, rectangle, sinks_N=None):
        options = paged_case.options(window, cap, sinks_N, deterministic)
        return reference.attend_pages(q_YWNH, pages, rectangle, 0, page_format, options)

    return compiling.jit(attend)


def _check(case: "_Case", window: int | None, deterministic: bool) -> None:
    case.check(case.attend(window, deterministic), window)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("path", _PATHS)
def test_ragged_lengths(path, window):
    """One token, a page less one, a page, one more; then many, among them more than a block."""
    width, deterministic = _PATHS[path]
    for seed, lengths in enumerate([(1, 15, 16, 17), (23, 24, 25, 48), (127, 128, 129, 300)]):
        _check(_Case(lengths, (4, 2), 16, width, seed=seed), window, deterministic)
    for seed in range(3, 6):
        lengths = np.random.default_rng(seed).integers(1, 400, 4).tolist()
        _check(_Case(lengths, (4, 2), 16, width, seed=seed), window, deterministic)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("path", [path for path, (width, _) in _PATHS.items() if width < 20])
def test_the_longest_rows_go_through_late_blocks_alone(path, window):
    """Rows that decode come in that order; in any other they are as right, and slower."""
    width, deterministic = _PATHS[path]
    lengths = 500, 400, 270, 260, 140, 120, 60, 17, 2, 1
    for order in (lengths, lengths[::-1], (1, 500, 17, 270, 2, 400, 140, 60, 260, 120)):
        _check(_Case(order, (4, 2), 16, width), window, deterministic)


@pytest.mark.parametrize("path", _MAIN_PATHS)
@pytest.mark.parametrize("heads", _HEADS)
def test_every_head_layout(path, heads):
    width, deterministic = _PATHS[path]
    _check(_Case((33, 1, 7, 160), heads, 16, width), None, deterministic)


@pytest.mark.parametrize("path", _MAIN_PATHS)
@pytest.mark.parametrize(("window", "page_tokens"), [(1, 8), (200, 4)])
def test_windows_and_page_sizes(path, window, page_tokens):
    width, deterministic = _PATHS[path]
    _check(_Case((1, 24, 40, 290), (4, 2), page_tokens, width), window, deterministic)


_SIGHTS = [Sight(24, first_tokens=5), Sight(40, first_tokens=140), Sight(96, chunked=True)]


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("sight", _SIGHTS)
def test_first_tokens_and_chunks(sight, path):
    """Of the first tokens less than a page, and more than a block."""
    width, deterministic = _PATHS[path]
    for lengths in ((1, 15, 96, 97), (192, 193, 400, 4), (160, 290, 17, 128)):
        _check(_Case(lengths, (4, 2), 16, width), sight, deterministic)


@pytest.mark.parametrize("masks", [{"trees": True}, {"canvases": True}])
@pytest.mark.parametrize("sight", [Sight(2, first_tokens=4), Sight(4, chunked=True)])
def test_first_tokens_and_chunks_of_trees_and_canvases(sight, masks):
    """Some of which are among the first tokens themselves."""
    _check(_Case((33, 2, 7, 160), (4, 2), 16, 12, **masks), sight, False)


@pytest.mark.parametrize("path", _MAIN_PATHS)
@pytest.mark.parametrize("sight", [Sight(24), Sight(24, first_tokens=20), Sight(96, chunked=True)])
def test_pages_that_nobody_sees_may_be_given_back(path, sight):
    """Their entries then name the sink, whatever it holds."""
    width, deterministic = _PATHS[path]
    case = _Case((300, 290, 300, 290), (4, 2), 16, width)
    before = case.attend(sight, deterministic)
    dead = keys_values(2, 10, *sight).dead_pages(290 - width, 16)
    assert len(dead) > 8
    case.table_YP[:, dead.start : dead.stop] = 0
    np.testing.assert_array_equal(case.attend(sight, deterministic), before)


@pytest.mark.parametrize("path", _MAIN_PATHS)
def test_scores_stay_within_their_cap(path):
    width, deterministic = _PATHS[path]
    case = _Case((33, 1, 7, 160), (4, 2), 16, width)
    found = case.attend(24, deterministic, 1.5)
    case.check(found, 24, 1.5)
    assert np.abs(found - case.attend(24, deterministic))[case.valid_YW].max() > 0.1


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("masks", [{"trees": True}, {"canvases": True}])
@pytest.mark.parametrize("path", ["block-diagonal, drafts", *_MAIN_PATHS[1:]])
def test_trees_and_canvases(path, masks, window):
    width, deterministic = _PATHS[path]
    _check(_Case((33, 1, 7, 160), (4, 2), 16, width, **masks), window, deterministic)


@pytest.mark.parametrize("path", _MAIN_PATHS)
def test_a_sink_takes_its_share(path):
    width, deterministic = _PATHS[path]
    case, sinks_N = _Case((33, 1, 7, 160), (4, 2), 16, width), np.float32([-3, 40, 0, 5])
    found = case.attend(24, deterministic, 1.5, sinks_N)
    case.check(found, 24, 1.5, sinks_N)
    assert np.abs(found[case.valid_YW][:, 1]).max() < 1e-6  # next to nothing is left


@pytest.mark.parametrize("path", _MAIN_PATHS)
def test_bfloat16_pages(path):
    width, deterministic = _PATHS[path]
    case = _Case((1, 40, 16, 270), (4, 2), 16, width, "bfloat16")
    assert case.pages.dtype == jnp.uint16
    _check(case, None, deterministic)


def test_large_scores_do_not_overflow():
    case = _Case((200, 1, 16, 300), (4, 2), 16, 1)
    case.q_YWNH = np.float32(case.q_YWNH * 1000).astype(np.float64)
    expected, _ = case.expected()
    np.testing.assert_allclose(case.attend(None, False), expected, atol=1e-3)


_LAYOUTS = ((9, 3), 64), ((4, 1), 256), ((8, 8), 32), ((14, 2), 80), ((6, 2), 24), ((16, 16), 96)


@pytest.mark.quick_code(False)
@pytest.mark.parametrize(("heads", "head_width", "dtype"), [
    pytest.param(*layout, dtype, marks=() if n % 2 == bit else pytest.mark.long)
    for n, layout in enumerate(_LAYOUTS) for bit, dtype in enumerate(("float32", "bfloat16"))
])  # fmt: skip
def test_deterministic_bits_do_not_depend_on_the_rectangle(heads, head_width, dtype):
    """Tokens alone, a few at a time, in a tile, beside others: the same bits."""
    case = _Case((40, 300, 7, 20), heads, 16, 20, dtype, head_width=head_width)
    found = case.attend(None, True)
    program, (q_YWNH, pages, whole) = _attend_pages(case.page_format, None, True), case.arguments
    for row, w, count in ((0, 19, 1), (0, 3, 1), (1, 10, 1), (1, 4, 3), (3, 2, 11)):
        part = slice(row, row + 1), slice(w, w + count)
        rectangle = Rectangle(
            whole.slot_Y[part[0]], whole.position_YW[part], whole.valid_YW[part],
            (whole.tables[0][part[0]],),
        )  # fmt: skip
        alone = program(q_YWNH[part], pages, rectangle)
        np.testing.assert_array_equal(np.asarray(alone)[0], found[row, w : w + count])


# --- the whole mixer ------------------------------------------------------------------------------

_ROPE = Rope()
_KIND = Attention(4, 2, 6, _ROPE)
_CONFIG = ModelConfig(
    "m", "llama", 31, width=12, num_layers=1, max_context=512, dtype="float32",
    pattern=(LayerSpec(_KIND, None),),
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("window",))
def _attend(q_TNH, k_TKH, v_TKH, leaf, ragged: Ragged, window: int | None = None):
    angles = rope.angles(_ROPE, _KIND.head_width, ragged.position_T)
    spec = keys_values(2, 6, window)
    context = StepContext(
        ragged, angles, spec, 0, True, False, page_format=spec.page_format("float32")
    )
    return attention.attend(q_TNH, k_TKH, v_TKH, leaf, context)


def _paged(num_tokens: int) -> Ragged:
    table = np.zeros((1, 128), np.int32)
    table[0, :4] = (3, 1, 4, 2)
    position = jnp.arange(num_tokens)[None]
    valid = jnp.ones(position.shape, bool)
    return Ragged((Rectangle(jnp.zeros(1, jnp.int32), position, valid, (jnp.asarray(table),)),))


def _random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_among_themselves_equal_rows_over_pages(window):
    q, k, v = _random(11, 4, 6), _random(11, 2, 6, seed=1), _random(11, 2, 6, seed=2)
    dense, left = _attend(q, k, v, None, contiguous(1, 11), window)
    again, _ = _attend(q, None, None, left, contiguous(1, 11), window)
    np.testing.assert_array_equal(again, dense)
    pages = Paged(jnp.full((6, 4, 24), jnp.nan).at[..., 12:].set(0))
    paged, written = _attend(q, k, v, pages, _paged(11), window)
    np.testing.assert_allclose(paged, dense, atol=1e-5)
    exact = [
        attention_case.exact(*map(np.asarray, (q[t], k, v)), paged_case.seen(t, window, 11))[0]
        for t in range(11)
    ]
    np.testing.assert_allclose(dense, exact, atol=1e-5)
    np.testing.assert_array_equal(
        written.pages[3, 0], jnp.concatenate([k[0].ravel(), v[0].ravel()])
    )


@pytest.mark.parametrize(
    "masks", [{"ancestors_YW": [[0b1, 0b11, 0b101, 0b1011]]}, {"causal_Y": [False]}]
)
def test_masks_and_sinks_are_the_same_without_a_cache(masks):
    q, k, v = _random(4, 4, 6), _random(4, 2, 6, seed=1), _random(4, 2, 6, seed=2)
    masks = {
        name: jnp.asarray(x, bool if x == [False] else jnp.uint32) for name, x in masks.items()
    }
    position_YW = jnp.array([[0, 1, 1, 2]]) if "ancestors_YW" in masks else jnp.arange(4)[None]

    @compiling.jit
    def attend(ragged, leaf):
        (rectangle,) = ragged.rectangles
        ragged = Ragged((dataclasses.replace(rectangle, position_YW=position_YW, **masks),))
        spec = keys_values(2, 6)
        context = StepContext(
            ragged, None, spec, 0, True, False, page_format=spec.page_format("float32")
        )
        return attention.attend(q, k, v, leaf, context, sinks_N=jnp.array([0.0, 1, -1, 2]))[0]

    dense = attend(contiguous(1, 4), None)
    np.testing.assert_allclose(attend(_paged(4), Paged(jnp.zeros((6, 4, 24)))), dense, atol=1e-6)


def test_a_layer_without_keys_reads_what_is_there():
    q, k, v = _random(5, 4, 6), _random(5, 2, 6, seed=1), _random(5, 2, 6, seed=2)
    first, pages = _attend(q, k, v, Paged(jnp.zeros((6, 4, 24))), _paged(5))
    second, after = _attend(q, None, None, pages, _paged(5))
    np.testing.assert_array_equal(second, first)
    chex.assert_trees_all_equal(after, pages)


def test_queries_need_keys_from_somewhere():
    with pytest.raises(ValueError, match="its own or an earlier layer's"):
        _attend(_random(3, 4, 6), None, None, None, contiguous(1, 3))


def test_heads_rotate_in_pairs():
    with pytest.raises(InputError, match="head_width is even .* not 5"):
        Attention(4, 2, 5)


def test_norms_of_heads_start_without_effect():
    """Whatever the family adds to the stored weight."""
    for offset in (0.0, 1.0):
        config = dataclasses.replace(_CONFIG, norm_offset=offset)
        params = init(dataclasses.replace(_KIND, qk_norm="head").parameters(config))
        for name in ("q_norm", "k_norm"):
            np.testing.assert_array_equal(params[name] + offset, np.ones(6))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("num_tokens", [2, 8])  # block-diagonal and per head
def test_a_bad_value_in_a_freed_page_reaches_nobody(bad, num_tokens):
    """Whoever wrote it sees it; the page's next owner must not, though its rows are still there."""
    q, k, v = _random(8, 4, 6), _random(8, 2, 6, seed=1), _random(8, 2, 6, seed=2)
    clean = Paged(jnp.zeros((6, 4, 24)))
    spoiled, pages = _attend(q, k, v.at[5, 0, 0].set(bad), clean, _paged(8))
    assert not np.isfinite(spoiled[5:]).all() and np.isfinite(spoiled[:5]).all()
    assert not np.isfinite(pages.pages).all()
    few = tuple(x[:num_tokens] for x in (q, k, v))
    found, _ = _attend(*few, pages, _paged(num_tokens))
    expected, _ = _attend(*few, clean, _paged(num_tokens))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("qk_norm", "has_gate", "rotates_first", "temperature"),
    [
        (None, 0, False, None), ("head", 0, False, None), ("head", 1, False, None),
        ("head", 0, True, None), ("all", 0, True, None), ("plain", 0, False, None),
        (None, 0, False, Temperature(0.7, 3)), ("plain", 1, False, Temperature(0.7, 4, offset=1)),
    ],
)  # fmt: skip
def test_apply_is_project_rotate_attend_project(qk_norm, has_gate, rotates_first, temperature):
    """The layer once more in numpy."""
    config = dataclasses.replace(_CONFIG, norm_offset=1.0)
    kind = dataclasses.replace(
        _KIND, qk_norm=qk_norm, scale=0.3, has_output_gate=bool(has_gate), temperature=temperature,
        rotates_first=rotates_first,
    )  # fmt: skip
    params = init(kind.parameters(config), 5)
    for name in ("q_norm", "k_norm") if qk_norm in ("head", "all") else ():
        params[name] = params[name] + 0.3 * _random(*params[name].shape, seed=3)
    x_TD, ragged = np.asarray(_random(9, 12)), contiguous(1, 9)
    angles = rope.angles(_ROPE, kind.head_width, ragged.position_T)
    context = StepContext(ragged, angles, keys_values(2, 6), 0, True, False)
    apply = jax.jit(lambda x: attention.apply(params, config, kind, x, None, context)[0])
    found = apply(x_TD)
    N, K, H = 4, 2, 6
    X = N * (1 + has_gate)  # the gate of a head follows its query
    assert params["qkv"].shape == ((X + 2 * K) * H, 12) and params["out"].shape == (12, N * H)
    heads = (np.asarray(x_TD, np.float64) @ np.asarray(params["qkv"]).T).reshape(9, X + 2 * K, H)

    def normed(x_TNH: np.ndarray, name: str) -> np.ndarray:
        if not qk_norm:
            return x_TNH
        factor = 1 + np.asarray(params.get(name, np.zeros(H)))
        x_TXX = x_TNH.reshape(9, -1, len(factor))
        x_TXX = x_TXX / np.sqrt((x_TXX**2).mean(-1, keepdims=True) + config.norm_eps)
        return (x_TXX * factor).reshape(x_TNH.shape)

    def rotated(x_TNH: np.ndarray, name: str) -> np.ndarray:
        x_TNH = x_TNH if rotates_first else normed(x_TNH, name)
        angle = np.arange(9)[:, None, None] * 10_000.0 ** (-np.arange(0, H, 2) / H)
        z = (x_TNH[..., :3] + 1j * x_TNH[..., 3:]) * np.exp(1j * angle)
        x_TNH = np.concatenate([z.real, z.imag], -1)
        return normed(x_TNH, name) if rotates_first else x_TNH

    q = rotated(heads[:, : X : 1 + has_gate], "q_norm") * 0.3
    if temperature is not None:
        turns = (np.arange(9) + temperature.offset) // temperature.length
        q *= 1 + 0.7 * np.log(1 + turns)[:, None, None]
    k, v = rotated(heads[:, X : X + K], "k_norm"), heads[:, X + K :]
    seen = functools.partial(paged_case.seen, window=None, num_keys=9)
    out = np.array([attention_case.exact(q[t], k, v, seen(t))[0] for t in range(9)])
    if has_gate:
        out /= 1 + np.exp(-heads[:, 1:X:2])
    expected = out.reshape(9, N * H) @ np.asarray(params["out"], np.float64).T
    np.testing.assert_allclose(found, expected, atol=1e-5)
