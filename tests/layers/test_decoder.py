"""The decoder as a composition: with and without pages, packed and alone, with other mixers."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Dynamic, Rope
from configs.model import LayerSpec, ModelConfig
from layers import decoder, kv_cache, params, registry
from layers.feed_forwards import dense
from layers.linear import look_up
from layers.mixers import attention
from layers.ragged import Ragged, Rectangle, contiguous
from tests import accelerators, compiling, fakes
from tests.kinds import Caching

pytestmark = pytest.mark.quick_code

_HEADS, _FFN = Attention(4, 2, 6), Gated(20)
_LLAMA = ModelConfig(
    "l", "llama", 31, width=12, num_layers=2, max_context=512, dtype="float32",
    pattern=(LayerSpec(_HEADS, _FFN),),
)  # fmt: skip


def _of(mixers, ffn=_FFN, **changes) -> ModelConfig:
    """The first model with other layers."""
    pattern = tuple(LayerSpec(mixer, ffn) for mixer in mixers)
    return dataclasses.replace(_LLAMA, num_layers=len(pattern), pattern=pattern, **changes)


_NORMED, _GELU = dataclasses.replace(_HEADS, qk_norm="head"), Gated(20, "gelu_tanh")
_LOCAL = dataclasses.replace(_NORMED, window=5)
_SANDWICH = dict(family="gemma3", tied=True, post_norms=True, norm_offset=1.0)
_SANDWICH |= dict(embedding_scale=12**0.5)
_GEMMA = _of([_LOCAL, dataclasses.replace(_NORMED, rope=Rope(1e6)), _LOCAL], _GELU, **_SANDWICH)
_SHARED = _of(  # two layers read the first one's keys, one the windowed one's
    [_NORMED, _LOCAL, *(dataclasses.replace(_NORMED, owner=owner) for owner in (0, 1, 0))],
    _GELU, **_SANDWICH,
)  # fmt: skip
_STILL = Attention(4, 2, 6, None, biases=("qkv", "out"), score_cap=2.0)
_QUIRKS = dataclasses.replace(  # every part of the families' that the two above do not have
    _LLAMA, num_layers=3, norm="layer", logit_cap=3.0, learned_positions=512,
    pattern=(LayerSpec(_STILL, Plain(20, has_bias=True)),
             LayerSpec(dataclasses.replace(_STILL, window=5), Gated(20, has_bias=True))),
)  # fmt: skip
_GROWING = Attention(4, 2, 6, Rope(100.0, Dynamic(4.0, 8), 0.7), qk_norm="all")
_AFTER = _of([_GROWING, dataclasses.replace(_GROWING, rope=None)], pre_norms=False, post_norms=True)
_PAGE = 4


@functools.cache
def _weights(config: ModelConfig):
    weights = params.init(decoder.param_infos(config), 1)
    return jax.tree.map(lambda w: w + 0.1 if w.ndim == 1 else w, weights)  # biases are 0 at first


@functools.cache
def _program(config: ModelConfig, num_rows: int, num_tokens: int):
    """Hidden states of rows that start at position 0, without a cache."""
    weights, ragged = _weights(config), contiguous(num_rows, num_tokens)
    return compiling.jit(lambda tokens: decoder.forward(weights, config, tokens, ragged)[0])


def _plain(config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Hidden states of one sequence, alone and without a cache."""
    return np.asarray(_program(config, 1, len(tokens))(tokens))


def _rectangle(rows: list[tuple[int, int, int]], width: int, num_groups: int) -> Rectangle:
    """Rows of (sequence, first position, length); sequence s holds pages 1 + 8 s and on."""
    position = np.zeros((len(rows), width), np.int32)
    valid = np.zeros((len(rows), width), bool)
    table = np.zeros((len(rows), 128), np.int32)
    for r, (sequence, first, length) in enumerate(rows):
        position[r, :length] = range(first, first + length)
        valid[r, :length] = True
        table[r, :8] = 1 + 8 * sequence + np.arange(8)[::-1]
    slots = np.array([row[0] for row in rows], np.int32)
    return Rectangle(slots, position, valid, (table,) * num_groups)


@pytest.mark.parametrize(
    "config",
    [_LLAMA, _GEMMA, _SHARED, _QUIRKS, _AFTER, fakes.side_by_side(width=12, vocab_size=31)],
    ids=["llama", "gemma3", "shared caches", "biases, positions, caps", "norms after", "parallel"],
)
def test_pages_equal_no_pages(config):
    """Sequences of 20 and 9 tokens: chunks at first, then decode rows and a chunk in one step."""
    tokens = [np.random.default_rng(s).integers(0, 31, 20) for s in range(2)]
    plain = [_plain(config, sequence) for sequence in tokens]
    weights, groups, none = _weights(config), len(config.page_groups), (0, 0, 0)
    leaves = kv_cache.init(config, (17,) * groups, _PAGE, 2, 0)
    run = compiling.jit(lambda t, ragged, c: decoder.forward(weights, config, t, ragged, c))
    steps = [  # (sequence, first position, length) of two decode rows and of two chunks
        ([none, none], [(0, 0, 7), (0, 7, 7)]),
        ([(0, 14, 1), none], [(1, 0, 7), none]),
        ([(0, 15, 1), (1, 7, 1)], [none, none]),
        ([(1, 8, 1), none], [(0, 16, 4), none]),
    ]
    found = [np.full_like(hidden, np.nan) for hidden in plain]
    for step in steps:
        rectangles = [_rectangle(*part, groups) for part in zip(step, (1, 7), strict=True)]
        packed = [
            tokens[sequence][rectangle.position_YW[r]]
            for rows, rectangle in zip(step, rectangles, strict=True)
            for r, (sequence, _, _) in enumerate(rows)
        ]
        ragged = Ragged(tuple(rectangles))
        hidden_TD, leaves = run(np.concatenate(packed), ragged, leaves)
        for rows, out_YWD in zip(step, ragged.split(np.asarray(hidden_TD)), strict=True):
            for (sequence, first, length), out_WD in zip(rows, out_YWD, strict=True):
                found[sequence][first : first + length] = out_WD[:length]
    for mine, theirs, fed in zip(found, plain, (20, 9), strict=True):
        np.testing.assert_allclose(mine[:fed], theirs[:fed], atol=2e-5)


def test_rows_of_a_batch_do_not_see_each_other():
    tokens = np.random.default_rng(0).integers(0, 31, (3, 20))
    together = _program(_GEMMA, 3, 20)(tokens.ravel())
    for row in range(3):
        np.testing.assert_allclose(
            together[20 * row :][:20], _plain(_GEMMA, tokens[row]), atol=1e-5
        )


def test_the_future_changes_nothing():
    tokens = np.random.default_rng(0).integers(0, 31, 20)
    changed = np.where(np.arange(20) < 6, tokens, (tokens + 1) % 31)
    one, other = _plain(_LLAMA, tokens), _plain(_LLAMA, changed)
    np.testing.assert_array_equal(one[:6], other[:6])
    assert (one[6:] != other[6:]).any(-1).all()


def test_it_can_be_differentiated():
    """The same function trains: a step against the gradient lowers the loss."""
    tokens = np.random.default_rng(0).integers(0, 31, 9)

    def loss(weights):
        hidden, _ = decoder.forward(weights, _GEMMA, tokens[:-1], contiguous(1, 8))
        logprobs = jax.nn.log_softmax(decoder.logits(weights, _GEMMA, hidden))
        return -logprobs[jnp.arange(8), tokens[1:]].mean()

    def step(weights):
        before, gradient = jax.value_and_grad(loss)(weights)
        stepped = jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradient)
        return before, gradient, loss(stepped)

    before, gradient, after = compiling.call(step, _weights(_GEMMA))
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradient))
    assert after < before


def test_tied_models_declare_no_head():
    untied = params.flatten(decoder.param_infos(_LLAMA))
    tied = params.flatten(decoder.param_infos(_GEMMA))
    assert "head/table" in untied and "head/table" not in tied
    hidden = jnp.ones((1, 12))
    np.testing.assert_allclose(
        decoder.logits(_weights(_GEMMA), _GEMMA, hidden)[0],
        _weights(_GEMMA)["embed"]["table"].sum(1),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        decoder.logits(_weights(_LLAMA), _LLAMA, hidden)[0],
        _weights(_LLAMA)["head"]["table"].sum(1),
        rtol=1e-5,
    )


def test_a_bfloat16_table_is_read_exactly():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((7, 4)), jnp.bfloat16)
    rows = look_up(table, jnp.array([6, 0, 6]))
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, np.asarray(table, np.float32)[[6, 0, 6]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [40, 128])
def test_rows_are_looked_up_exactly_on_a_tpu(width, dtype):
    """Also by the product that a table of uneven rows gets there."""
    table = jax.random.normal(jax.random.key(0), (50, width), dtype)
    ids = jnp.array([49, 0, 7, 7])
    rows = accelerators.written_for("tpu", look_up)(table, ids)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, np.asarray(table, np.float32)[np.asarray(ids)])
    assert ("dot_general" in accelerators.primitives(look_up, table, ids, platform="tpu")) == (
        width == 40 and dtype == "bfloat16"
    )


def test_every_declared_part_is_used():
    """Each of a model's parameters moves its logits, and the caps hold them."""
    tokens = np.arange(20)

    def forward(weights, config):
        hidden, _ = decoder.forward(weights, config, tokens, contiguous(1, 20))
        return decoder.logits(weights, config, hidden)

    logits = compiling.jit(forward, static_argnames="config")
    for config in (_QUIRKS, _AFTER):
        weights = jax.tree.map(np.asarray, _weights(config))
        before = logits(weights, config)
        for path, leaf in params.flatten(weights).items():
            noise = np.random.default_rng(0).standard_normal(leaf.shape).astype(np.float32)
            moved = params.flatten(weights) | {path: leaf + noise}
            after = logits(params.unflatten(decoder.param_infos(config), moved), config)
            assert np.abs(after - before).max() > 1e-3, path
    assert np.abs(logits(jax.tree.map(lambda w: w * 9, _weights(_QUIRKS)), _QUIRKS)).max() <= 3.0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_feed_forward(activation):
    kind = Gated(20, activation)
    weights = params.init(kind.parameters(_LLAMA), 2)
    x = np.random.default_rng(0).standard_normal((5, 12))
    gate, up = np.split(x @ np.asarray(weights["gate_up"], np.float64).T, 2, axis=1)
    if activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    expected = (gate * up) @ np.asarray(weights["down"], np.float64).T
    found = dense.up_and_down(weights, _LLAMA, activation, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_kind_that_nothing_applies_is_refused_by_name():
    @dataclasses.dataclass(frozen=True)
    class Unknown(Caching, name="unknown"):
        """A mixer without a function."""

    with pytest.raises(InputError, match="mixer 'unknown' is planned but .*; attention.* do"):
        decoder.param_infos(_of([Unknown(CacheSpec())]))


def test_a_layer_may_have_no_feed_forward():
    config = _of([_HEADS], None)
    assert set(decoder.param_infos(config)["layers"][0]) == {"mixer", "mixer_norm"}
    assert np.isfinite(_plain(config, np.arange(7))).all()


def test_a_sharer_projects_queries_only():
    declared = decoder.param_infos(_SHARED)["layers"]
    assert declared[0]["mixer"]["qkv"].shape == ((4 + 2 * 2) * 6, 12)
    for sharer in declared[2:]:
        assert set(sharer["mixer"]) == {"q", "q_norm", "out"}
        assert sharer["mixer"]["q"].shape == (4 * 6, 12)


def test_without_a_cache_sharers_are_handed_their_owners_keys(monkeypatch):
    seen = {}

    def spy(params, config, kind, x_TD, leaf, context):
        seen[len(seen)] = leaf
        return attention.apply(params, config, kind, x_TD, leaf, context)

    monkeypatch.setitem(registry._MIXERS, Attention, spy)

    def forward(weights):
        with jax.disable_jit():  # of what it calls: the spy sees values of this function
            _, nothing = decoder.forward(weights, _SHARED, np.arange(9), contiguous(1, 9))
        return nothing, seen

    nothing, seen = compiling.call(forward, _weights(_SHARED))
    assert nothing is None and seen[0] is None and seen[1] is None
    chex.assert_trees_all_equal(seen[2], seen[4])
    assert (seen[2].k_TKH != seen[3].k_TKH).any()


def test_a_window_changes_what_is_seen():
    windowed = _LLAMA.with_kinds(window=4)
    assert windowed.cache_specs == (cache.keys_values(2, 6, window=4),) * 2
    tokens = np.random.default_rng(0).integers(0, 31, 20)
    assert (_plain(windowed, tokens) != _plain(_LLAMA, tokens)).any()


def _plus(leaf, number):
    return jax.tree.map(lambda array: array + number, leaf)


def test_a_sharer_reads_the_leaf_of_its_owner(monkeypatch):
    seen = []

    def apply(params, config, kind, x_TD, leaf, context):
        seen.append(
            (float(leaf.pages[0, 0, 0]), context.group, context.is_owner, context.spec.window)
        )
        return jnp.zeros_like(x_TD), _plus(leaf, 1) if context.is_owner else leaf

    own, local = cache.keys_values(2, 6), cache.keys_values(2, 6, window=4)
    config = _of([Caching(spec) for spec in (own, local, cache.shared(1), cache.shared(0))])
    monkeypatch.setitem(registry._MIXERS, Caching, apply)
    weights = params.init(decoder.param_infos(config))
    first, second, *nothing = kv_cache.init(config, (3, 3), _PAGE, 1, 0)
    leaves = (_plus(first, 10), _plus(second, 20), *nothing)
    ragged = Ragged((_rectangle([(0, 0, 2)], 2, 2),))
    with jax.disable_jit():
        _, after = decoder.forward(weights, config, np.arange(2), ragged, leaves)
    assert seen == [
        (10, 0, True, None), (20, 1, True, 4), (21, 1, False, 4), (11, 0, False, None),
    ]  # fmt: skip
    assert [type(leaf) for leaf in after] == [kv_cache.Paged] * 2 + [kv_cache.Empty] * 2
