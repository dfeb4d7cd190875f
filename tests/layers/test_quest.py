"""Attention over pages that each query chooses by the extremes of their keys."""

import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import PageFormat
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from layers import decoder, kv_cache, params
from layers.backends import backends
from layers.kernels.attention import api
from layers.kernels.attention.contract import PLAIN
from layers.kv_cache import Indexed
from layers.ragged import Ragged, Rectangle
from layers.sparse import quest
from tests import compiling
from tests.layers import native
from tests.layers.chosen_case import decoded

pytestmark = pytest.mark.quick_code


def _model(token_budget):
    mixer = Attention(6, 2, 8, token_budget=token_budget)
    return ModelConfig(
        "m", "llama", 31, 24, 2, 256, (LayerSpec(mixer, Gated(20)),), dtype="float32"
    )


@pytest.fixture(params=["reference", "ffi_cpu"])
def told(request):
    """The decoder's implementation of attention, with its kernels or XLA's path beside it."""
    if request.param == "ffi_cpu":
        native.need()
    with backends.use(backends.CPU if request.param == "ffi_cpu" else None):
        yield {"attention": request.param}


@pytest.mark.parametrize("budget", [48, 160])
def test_all_pages_are_plain_attention_bit_for_bit(told, budget):
    """Beside a row that has more pages than it may read, too."""
    weights = params.init(decoder.param_infos(_model(None)), 1)
    expected, found = (decoded(_model(own), weights, 2, **told) for own in (None, budget))
    np.testing.assert_array_equal(found[1], expected[1])
    assert (found[0] == expected[0]).all() == (budget == 160)


def test_a_choice_depends_on_no_neighbour_no_chunk_and_nothing_that_pages_held_before(told):
    own = _model(32)
    weights = params.init(decoder.param_infos(own), 1)
    both = decoded(own, weights, 2, **told)
    np.testing.assert_array_equal(decoded(own, weights, 1, **told)[-1], both[1])
    np.testing.assert_array_equal(decoded(own, weights, 2, np.nan, 16, **told), both)


def test_the_pages_with_the_largest_bounds_are_read(told):
    """Against the sums written out, for queries at the end of a page and within one."""
    page, columns, budget = 4, 32, 20
    rng, page_format = np.random.default_rng(0), PageFormat(2, 6, 6, False, "float32")
    position_YW = np.array([[100, 101, 102, 103], [59, 60, 61, 62]], np.int32)
    table_YP = 1 + rng.permutation(2 * columns).reshape(2, columns).astype(np.int32)
    pages = jnp.asarray(rng.standard_normal((1 + 2 * columns, page, 24)), jnp.float32)
    all_YW = np.minimum(np.arange(128), position_YW[:, -1:]).astype(np.int32)
    fed = Rectangle(jnp.arange(2), all_YW, np.arange(128) <= position_YW[:, -1:], (table_YP,))
    empty = jnp.full((1 + 2 * columns, 2, 12), jnp.nan)
    q_YWNH = jnp.asarray(rng.standard_normal((2, 4, 4, 6)), jnp.float32)
    rectangle = Rectangle(
        jnp.arange(2), position_YW, np.ones((2, 4), bool), (jnp.asarray(table_YP),)
    )

    def attend(q_YWNH, pages):
        leaf = quest.summarized(Indexed(pages, empty), Ragged((fed,)), 0, page_format)
        chosen = api.implementation(told["attention"])
        return quest.attend(chosen, q_YWNH, leaf, rectangle, 0, page_format, PLAIN, budget)

    found = compiling.call(attend, q_YWNH, pages)
    for y, w in np.ndindex(2, 4):
        at = position_YW[y, w]
        rows = np.asarray(pages)[table_YP[y]].reshape(-1, 2, 2, 6)[: at + 1]  # [S, K and V, K, H]
        for head in range(2):
            q = np.asarray(q_YWNH)[y, w, 2 * head : 2 * head + 2]
            full = [rows[i * page : (i + 1) * page, 0, head] for i in range(at // page)]
            bounds = [np.maximum(q * k.min(0), q * k.max(0)).sum() for k in full]
            best = 1 + np.argsort(bounds[1:])[::-1][: budget // page - 2]
            read = [*range(page), *(page * p + i for p in best for i in range(page))]
            read += range(at // page * page, at + 1)
            scores = q @ rows[read, 0, head].T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            expected = weights @ rows[read, 1, head] / weights.sum(1, keepdims=True)
            np.testing.assert_allclose(found[y, w, 2 * head : 2 * head + 2], expected, atol=1e-5)


def test_pages_are_as_large_as_predicted():
    own = _model(32)
    for page in (4, 128):
        cache = kv_cache.abstract(own, (7,), page, 2, 0)
        held = sum(x.size * 4 for leaf in cache for x in (leaf.pages, leaf.index))
        assert held == 7 * own.page_bytes(page)[0]
    assert own.page_bytes(256)[0] == 2 * own.page_bytes(128)[0]


def test_a_budget_goes_with_a_cache_of_its_own():
    for changes in ({"window": 8}, {"owner": 0}):
        with pytest.raises(InputError, match="token_budget=32 chooses among all tokens"):
            Attention(6, 2, 8, token_budget=32, **changes)
    with pytest.raises(InputError, match="token_budget is at least 1, not 0"):
        Attention(6, 2, 8, token_budget=0)
