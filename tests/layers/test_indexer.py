"""Attention over the tokens that an indexer chooses."""

import jax.numpy as jnp
import numpy as np
import pytest

from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.model import LayerSpec, ModelConfig
from layers import decoder, params
from layers.sparse import chosen
from tests.layers.chosen_case import decoded

pytestmark = pytest.mark.quick_code


def _model(indexer, dtype="float32"):
    mixer = Latent(3, 10, 4, 6, 8, query_rank=14, indexer=indexer)
    return ModelConfig("m", "m", 31, 24, 2, 256, (LayerSpec(mixer, Gated(20)),), dtype=dtype)


def _weights(own):
    weights = params.init(decoder.param_infos(own), 1)
    for layer in weights["layers"]:
        layer["mixer"].pop("indexer", None)
    return weights


@pytest.mark.parametrize("top_k", [41, 150])
def test_what_chooses_all_is_latent_attention_bit_for_bit(top_k):
    """Beside a row that has more to choose from than it may read, too."""
    plain, own = _model(None), _model(Indexer(5, 6, top_k))
    weights = params.init(decoder.param_infos(own), 1)
    expected, found = decoded(plain, _weights(own), 2), decoded(own, weights, 2)
    np.testing.assert_array_equal(found[1], expected[1])
    assert (found[0] == expected[0]).all() == (top_k >= 150)


def test_a_choice_depends_on_no_neighbour_and_on_nothing_that_pages_held_before():
    own = _model(Indexer(5, 6, 20))
    weights = params.init(decoder.param_infos(own), 1)
    both = decoded(own, weights, 2)
    np.testing.assert_array_equal(decoded(own, weights, 1)[-1], both[1])
    np.testing.assert_array_equal(decoded(own, weights, 2, np.nan), both)


def test_the_best_in_their_order_and_of_equals_the_first():
    scores = jnp.asarray([[3.0, 1.0, 3.0, jnp.nan, 0.0, 3.0, 1.0]] * 3)
    is_open = jnp.asarray([[1, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 1, 0, 0], [0] * 7], bool)
    index, count = chosen.best(scores, is_open, 4)
    np.testing.assert_array_equal(index, [[0, 1, 2, 5], [0, 4, 7, 7], [7] * 4])
    np.testing.assert_array_equal(count, [4, 2, 0])
