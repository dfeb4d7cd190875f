"""Attention over the tokens that an indexer chooses."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.model import LayerSpec, ModelConfig
from layers import decoder, kv_cache, params
from layers.kernels.attention import chosen
from layers.ragged import Ragged, Rectangle
from tests import compiling

pytestmark = pytest.mark.quick_code

_TOKENS = np.random.default_rng(2).integers(0, 31, (2, 150))
_LENGTHS = 150, 41


def _model(indexer, dtype="float32"):
    mixer = Latent(3, 10, 4, 6, 8, query_rank=14, indexer=indexer)
    return ModelConfig("m", "m", 31, 24, 2, 256, (LayerSpec(mixer, Gated(20)),), dtype=dtype)


def _weights(own):
    weights = params.init(decoder.param_infos(own), 1)
    for layer in weights["layers"]:
        layer["mixer"].pop("indexer", None)
    return weights


def _decoded(own, weights, num_rows, spoiled=None):
    """Logits of the last token of each row, decoded behind a prompt that is fed in one chunk, bits
    independent of rectangles; both rows have their own pages.
    """
    page, columns = 16, 16
    cache = kv_cache.init(own, (1 + 2 * columns,), page, 2, 0)
    if spoiled is not None:  # what earlier owners left in pages
        cache = [dataclasses.replace(leaf, index=leaf.index + spoiled) for leaf in cache]
    table = 1 + np.arange(2 * columns, dtype=np.int32).reshape(2, columns)

    @compiling.jit
    def run(tokens_YW, position_YW, valid_YW, cache):
        rows = jnp.arange(2 - num_rows, 2)
        rectangle = Rectangle(rows, position_YW[rows], valid_YW[rows], (jnp.asarray(table)[rows],))
        # Fillers, as the engine has them: products of few rows sum in other orders.
        tokens_T = jnp.pad(tokens_YW[rows].ravel(), (0, 8))
        ragged = Ragged((rectangle,), 8)
        hidden_TD, cache = decoder.forward(
            weights, own, tokens_T, ragged, cache, deterministic=True
        )
        return decoder.logits(weights, own, hidden_TD), cache

    at = np.arange(149)
    position_YW = np.stack([np.minimum(at, n - 2) for n in _LENGTHS]).astype(np.int32)
    valid_YW = np.stack([at < n - 1 for n in _LENGTHS])
    _, cache = run(_TOKENS[:, :149], position_YW, valid_YW, cache)
    last = np.array([[n - 1] for n in _LENGTHS], np.int32)
    tokens = np.take_along_axis(_TOKENS, last, axis=1)
    return np.asarray(run(tokens, last, np.ones((2, 1), bool), cache)[0])[:num_rows]


@pytest.mark.parametrize("top_k", [41, 150])
def test_what_chooses_all_is_latent_attention_bit_for_bit(top_k):
    """Beside a row that has more to choose from than it may read, too."""
    plain, own = _model(None), _model(Indexer(5, 6, top_k))
    weights = params.init(decoder.param_infos(own), 1)
    expected, found = _decoded(plain, _weights(own), 2), _decoded(own, weights, 2)
    np.testing.assert_array_equal(found[1], expected[1])
    assert (found[0] == expected[0]).all() == (top_k >= 150)


def test_a_choice_depends_on_no_neighbour_and_on_nothing_that_pages_held_before():
    own = _model(Indexer(5, 6, 20))
    weights = params.init(decoder.param_infos(own), 1)
    both = _decoded(own, weights, 2)
    np.testing.assert_array_equal(_decoded(own, weights, 1)[-1], both[1])
    np.testing.assert_array_equal(_decoded(own, weights, 2, np.nan), both)


def test_the_best_in_their_order_and_of_equals_the_first():
    scores = jnp.asarray([[3.0, 1.0, 3.0, jnp.nan, 0.0, 3.0, 1.0]] * 3)
    is_open = jnp.asarray([[1, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 1, 0, 0], [0] * 7], bool)
    index, count = chosen.best(scores, is_open, 4)
    np.testing.assert_array_equal(index, [[0, 1, 2, 5], [0, 4, 7, 7], [7] * 4])
    np.testing.assert_array_equal(count, [4, 2, 0])
