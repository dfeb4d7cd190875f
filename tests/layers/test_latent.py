"""Latent attention: absorbed into queries, it is what keys and values of all heads give."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from layers import decoder, kv_cache, params
from layers.ragged import Ragged, Rectangle, contiguous
from tests import compiling

pytestmark = pytest.mark.quick_code

_KINDS = {
    "queries at once": Latent(3, 10, 4, 6, 8),
    "compressed queries": Latent(
        5, 18, 8, 10, 6, query_rank=14, scale=0.4, temperature=Temperature(0.5, 8)
    ),
    "halves": Latent(4, 12, 6, 8, 12, rope=Rope(500.0)),
    "no positions": Latent(4, 12, 6, 8, 12, query_rank=14, rope=None, has_bias=True),
    "chosen tokens": Latent(3, 10, 4, 6, 8, query_rank=14, indexer=Indexer(5, 6, 7)),
    "chosen tokens, queries at once": Latent(3, 10, 4, 6, 8, indexer=Indexer(3, 9, 20, True)),
}
_OWNERS = {"an earlier layer's": (None, None, 0, 1, 0)}


def model(kind, dtype="float32", owners=(None, None)):
    pattern = tuple(LayerSpec(dataclasses.replace(kind, owner=own), Gated(20)) for own in owners)
    return ModelConfig("m", "deepseek_v3", 31, 24, len(pattern), 128, pattern, dtype=dtype)


def paged(own, weights, tokens, chunk, page_tokens=4):
    """Logits of a prompt in chunks through pages, beside a row of padding."""
    pages = -(-len(tokens) // page_tokens)
    cache = kv_cache.init(own, (1 + pages,), page_tokens, 2, 0)
    table = np.zeros((2, 128 // page_tokens), np.int32)
    table[0, :pages] = 1 + np.random.default_rng(0).permutation(pages)

    @compiling.jit
    def run(tokens_T, ragged, cache):
        hidden_TD, cache = decoder.forward(weights, own, tokens_T, ragged, cache)
        return decoder.logits(weights, own, hidden_TD), cache

    found = []
    for start in range(0, len(tokens), chunk):
        part = np.zeros((2, chunk), np.int32)
        length = len(tokens[start : start + chunk])
        part[0, :length] = tokens[start : start + chunk]
        at = np.minimum(np.arange(chunk), length - 1)
        position_YW = jnp.asarray(np.stack([start + at, 0 * at]), jnp.int32)
        valid_YW = jnp.asarray(np.stack([np.arange(chunk) < length, np.zeros(chunk, bool)]))
        slot_Y = jnp.asarray([0, 2], jnp.int32)
        rows = Rectangle(slot_Y, position_YW, valid_YW, (jnp.asarray(table),))
        logits_TV, cache = run(jnp.asarray(part.ravel()), Ragged((rows,)), cache)
        found.append(np.asarray(logits_TV)[:length])
    return np.concatenate(found)


@pytest.mark.parametrize("name", [*_KINDS, *_OWNERS])
def test_absorbed_and_expanded_give_the_same(name):
    """Without a cache keys and values are projected out; over pages queries are projected in."""
    own = model(_KINDS.get(name, _KINDS["halves"]), owners=_OWNERS.get(name, (None, None)))
    weights = params.init(decoder.param_infos(own), 1)
    tokens = np.random.default_rng(2).integers(0, 31, 41)

    def uncached(tokens_T):
        hidden_TD, nothing = decoder.forward(weights, own, tokens_T, contiguous(1, 41))
        assert nothing is None
        return decoder.logits(weights, own, hidden_TD)

    expected = np.asarray(compiling.call(uncached, tokens))
    for chunk in (1, 16) if name == "compressed queries" else (16,):
        np.testing.assert_allclose(paged(own, weights, tokens, chunk), expected, atol=1e-5)


def test_a_token_takes_one_latent_vector_and_one_rotary_key():
    own = model(_KINDS["compressed queries"], "bfloat16")
    (group,) = own.page_groups
    assert group.spec.elements_per_token == 18 + 8 and group.spec.values_in_keys
    leaf, _ = kv_cache.abstract(own, (9,), 4, 2, 0)
    assert leaf.pages.shape == (9, 4, 26) and leaf.pages.dtype == jnp.uint16


def test_a_sharer_has_ways_of_its_own_out_of_another_layers_latents():
    own = model(_KINDS["compressed queries"], owners=(None, 0))
    declared = decoder.param_infos(own)["layers"]
    assert declared[0]["mixer"].keys() - declared[1]["mixer"].keys() == {"kv_down", "kv_norm"}
    assert [group.layers for group in own.page_groups] == [(0,)]
    leaves = kv_cache.abstract(own, (9,), 4, 2, 0)
    assert leaves[0].pages.shape == (9, 4, 26) and leaves[1] == kv_cache.Empty()


def test_a_nan_stays_in_its_key():
    """What is not finite in a freed page reaches nobody who does not see it."""
    own = model(_KINDS["halves"])
    weights = params.init(decoder.param_infos(own), 1)
    tokens = np.random.default_rng(3).integers(0, 31, 9)
    weights["embed"]["table"] = weights["embed"]["table"].at[30].set(jnp.nan)
    tokens[tokens == 30] = 0
    expected = paged(own, weights, tokens, 9)
    poisoned = np.concatenate([tokens, [30, 30]])
    found = paged(own, weights, poisoned, 11)
    np.testing.assert_allclose(found[:9], expected, atol=1e-5)
    assert np.isnan(found[9:]).all()
    # The same pages, whose last entries now belong to nobody.
    np.testing.assert_allclose(paged(own, weights, poisoned[:10], 10)[:9], expected, atol=1e-5)


def test_gradients_flow_without_a_cache():
    own = model(_KINDS["compressed queries"])
    own = dataclasses.replace(own, num_layers=1, pattern=own.pattern[:1])
    weights = params.init(decoder.param_infos(own), 1)

    def loss(weights):
        hidden_TD, _ = decoder.forward(weights, own, jnp.arange(12), contiguous(1, 12))
        return (decoder.logits(weights, own, hidden_TD) ** 2).mean()

    gradients = compiling.call(jax.grad(loss), weights)["layers"][0]["mixer"]
    chex.assert_tree_all_finite(gradients)
    assert all(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_an_indexer_needs_positions():
    with pytest.raises(InputError, match="rope=None goes without an indexer, whose keys rotate"):
        Latent(3, 8, 4, 6, 5, rope=None, indexer=Indexer(2, 4, 8))
