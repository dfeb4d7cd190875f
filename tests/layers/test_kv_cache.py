"""Leaves, bits and writes of the cache."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import cache
from configs.kinds.attention import Attention
from configs.model import LayerSpec, ModelConfig
from layers import kv_cache, page_rows
from layers.ragged import Ragged, Rectangle
from tests.kinds import Caching

_PAGE = 4


def _model(dtype: str = "bfloat16") -> ModelConfig:
    """Global and windowed attention, a state, and a layer that reads the first one's pages."""
    mixers = (
        Attention(4, 2, 6),
        Attention(4, 2, 6, window=8),
        Caching(cache.recurrent((7,))),
        Attention(4, 2, 6, owner=0),
    )
    pattern = tuple(LayerSpec(mixer, None) for mixer in mixers)
    return ModelConfig(
        "m", "llama", 31, width=12, num_layers=4, max_context=64, pattern=pattern, dtype=dtype
    )


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "uint16"), ("float32", "float32")])
def test_one_leaf_a_layer_as_its_spec_says(dtype, stored):
    config = _model(dtype)
    leaves = kv_cache.abstract(config, (9, 5), _PAGE, 3, 2)
    shapes = [[(array.shape, str(array.dtype)) for array in jax.tree.leaves(x)] for x in leaves]
    assert shapes == [
        [((9, _PAGE, 24), stored)],
        [((5, _PAGE, 24), stored)],
        [((4, 3, 7), "float32"), ((1, 7), "float32")],  # slots and the sink, 1 + k states each
        [],
    ]
    made = kv_cache.init(config, (9, 5), _PAGE, 3, 2)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(made))
    spec, per_page = config.cache_specs[0], made[0].pages[0].nbytes
    assert per_page == spec.bytes_per_entry(dtype) * _PAGE
    assert made[2].states[0][0].nbytes == config.cache_specs[2].bytes_per_sequence(2)


def test_an_indexer_has_pages_of_its_own():
    spec = dataclasses.replace(cache.latent(16, 8), index_width=6)
    pattern = (LayerSpec(Caching(spec), None),)
    config = dataclasses.replace(_model("float32"), num_layers=1, pattern=pattern)
    (leaf,) = kv_cache.abstract(config, (9,), _PAGE, 3, 0)
    assert leaf.pages.shape == (9, _PAGE, 24) and leaf.index.shape == (9, _PAGE, 6)
    assert spec.bytes_per_entry("float32") == 4 * (24 + 6)


def test_bfloat16_is_kept_as_its_bits():
    pages = jnp.zeros((1, 1, 6), jnp.uint16)
    x = jnp.array([0.0, -0.0, 1.0, jnp.inf, jnp.nan, 1.00390625])
    stored = page_rows.encode(x, pages)
    assert stored.dtype == jnp.uint16
    # 1 + 2^-8 lies between two bfloat16 numbers and rounds to the even one.
    assert [hex(bits) for bits in stored.tolist()[:4]] == ["0x0", "0x8000", "0x3f80", "0x7f80"]
    back = page_rows.decode(stored)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.astype(jnp.float32), x.astype(jnp.bfloat16).astype(float))


def test_float32_is_kept_as_it_is():
    pages, x = jnp.zeros((1, 1, 2)), jnp.array([1 / 3, -2.5])
    np.testing.assert_array_equal(page_rows.decode(page_rows.encode(x, pages)), x)


def _ragged() -> Ragged:
    """A decode row at position 5 and a padding row; a chunk of positions 2 to 4 with padding."""
    table = np.zeros((3, 4), np.int32)
    table[0, :2], table[2, :2] = (3, 6), (5, 2)

    def rectangle(rows: slice, positions: list, valid: list) -> Rectangle:
        slots = jnp.arange(3)[rows]
        return Rectangle(slots, jnp.array(positions), jnp.array(valid), (jnp.asarray(table[rows]),))

    decode = rectangle(slice(0, 2), [[5], [0]], [[True], [False]])
    chunk = rectangle(slice(2, 3), [[2, 3, 4, 0]], [[True, True, True, False]])
    return Ragged((decode, chunk))


def test_tokens_are_written_to_their_pages_and_padding_to_the_sink():
    before = np.random.default_rng(0).standard_normal((8, _PAGE, 3)).astype(np.float32)
    x_TX = np.arange(18, dtype=np.float32).reshape(6, 3)
    after = np.asarray(jax.jit(page_rows.write, static_argnums=3)(before, x_TX, _ragged(), 0))
    expected = before.copy()
    expected[6, 1] = x_TX[0]  # position 5: the second page's second token
    expected[5, 2:4], expected[2, 0] = x_TX[2:4], x_TX[4]
    np.testing.assert_array_equal(after[1:], expected[1:])


def test_pages_are_copied_whole_and_the_sink_onto_itself():
    before = np.random.default_rng(0).integers(0, 2**16, (8, _PAGE, 3)).astype(np.uint16)
    copies = [np.array([[3, 0, 0], [6, 0, 0]], np.int32)]
    groups = cache.page_groups((cache.keys_values(1, 1),))
    index = np.random.default_rng(1).random((8, _PAGE, 1)).astype(np.float32)
    leaf = kv_cache.Indexed(before, index)
    [after] = jax.jit(kv_cache.copy_pages, static_argnums=1)((leaf,), groups, copies)
    order = [0, 1, 2, 3, 4, 5, 3, 7]
    chex.assert_trees_all_equal(after, kv_cache.Indexed(before[order], index[order]))
