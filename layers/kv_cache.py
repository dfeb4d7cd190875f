"""The device side of the cache: one leaf a layer, laid out by its `CacheSpec`.

Pages are token-major, [pages, page tokens, elements], unless the implementation of attention lays
its own out (`layers/kernels/attention/contract.py`). Page 0 and the last slot are sinks for
padding: nothing reads them. bfloat16 elements are kept as their bits in uint16: XLA's CPU backend
rewrites a whole bfloat16 array for every scatter and converts it to float32 for every gather,
integers stay in place.

A recurrent state is float32 [slots + 1, 1 + k, elements]: the state after position p lives at index
p mod (1 + k), so that the committed length alone names the state to read.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from configs.cache import CacheSpec, PageFormat
from configs.model import ModelConfig
from layers.kernels.device import has_free_views
from layers.ragged import Ragged

CacheLeaf = Any  # an array, or a pytree of arrays: pages and what belongs to them
Cache = tuple[CacheLeaf, ...]  # a leaf a layer, None where it reads another's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Indexed:
    """Pages, and by what queries choose what they read of them.

    Attributes:
        pages: of keys and values.
        index: an indexer's keys, [pages, page tokens, width]; or the smallest and the largest of
            each of the keys' elements, [pages, 2, K H], where nothing is told of a page that is not
            full (`layers/sparse/quest.py`).
    """

    pages: CacheLeaf
    index: CacheLeaf


def abstract(
    config: ModelConfig,
    num_pages: tuple[int, ...],
    page_tokens: int,
    max_seqs: int,
    num_drafts: int,
    layout: Callable[[int, int, PageFormat], CacheLeaf] | None = None,
) -> Cache:
    """Shapes of the cache: `num_pages` counts each page group's pages, the sink included; `layout`
    is that of the chosen attention, None for any that is token-major.
    """

    def leaf(layer: int) -> CacheLeaf:
        spec = config.cache_specs[layer]
        if spec.elements_per_token:
            pages = num_pages[config.group_of_layer[layer]], page_tokens
            is_attention = config.layers[layer].mixer.query_heads > 0
            of_format = layout if layout is not None and is_attention else token_major
            leaf = of_format(*pages, spec.page_format(config.cache_dtype))
            if spec.has_extremes:
                return Indexed(leaf, _extremes(pages[0], spec, config.cache_dtype))
            if not spec.index_width:
                return leaf
            return Indexed(leaf, token_major(*pages, spec.index_format(config.cache_dtype)))
        if spec.elements_per_sequence:
            shape = (max_seqs + 1, 1 + num_drafts, spec.elements_per_sequence)
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return None

    return tuple(leaf(layer) for layer in range(config.num_layers))


def init(*args: Any) -> Cache:
    """An empty cache; same arguments as `abstract`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract(*args))


def token_major(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """Pages of one packed row a token."""
    shape = num_pages, page_tokens, page_format.row_width
    return jax.ShapeDtypeStruct(shape, stored_dtype(page_format.dtype))


def _extremes(num_pages: int, spec: CacheSpec, dtype: str) -> jax.ShapeDtypeStruct:
    shape = num_pages, 2, spec.kv_heads * spec.key_width
    return jax.ShapeDtypeStruct(shape, stored_dtype(dtype))


def stored_dtype(dtype: str) -> Any:
    """Type that holds a model dtype's elements in pages."""
    return jnp.uint16 if dtype == "bfloat16" else jnp.dtype(dtype)


def encode(x: jax.Array, pages: jax.Array) -> jax.Array:
    """Elements as `pages` stores them."""
    if pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pages.dtype)


def decode(stored: jax.Array) -> jax.Array:
    """Stored elements as numbers."""
    return (
        jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored
    )


def write(pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """Stores a row of elements of each packed token, in place where `pages` is donated.

    `row_TX` is [T, ...] of any shape, such as [T, 2 K, H]: pages are viewed in it, since XLA's CPU
    backend computes a reshape of the elements one by one, unless that would be a copy of the pages.
    """
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    if not has_free_views():
        row_TX = row_TX.reshape(-1, *pages.shape[2:])
    view = pages.reshape(*pages.shape[:2], *row_TX.shape[1:])
    view = view.at[page_T, offset_T].set(encode(row_TX, pages), mode="promise_in_bounds")
    return view.reshape(pages.shape)


def copy_pages(leaf: CacheLeaf, source_X: jax.Array, target_X: jax.Array) -> CacheLeaf:
    """Copy-on-write: whole pages, before anything of the step is written. Sink to sink is a
    no-op.
    """
    return jax.tree.map(
        lambda pages: pages.at[target_X].set(pages[source_X], mode="promise_in_bounds"), leaf
    )


def move(
    leaf: CacheLeaf,
    source: tuple[jax.Array, jax.Array],
    target: tuple[jax.Array, jax.Array],
) -> CacheLeaf:
    """Copies tokens' entries, all read before any is written; each is (pages, offsets) as
    `Ragged.page_T` gives them.
    """

    def moved(pages: jax.Array) -> jax.Array:
        row_TX = pages.at[source].get(mode="promise_in_bounds")
        # Fused with what it reads from, the write would need a copy of all pages.
        row_TX = jax.lax.optimization_barrier(row_TX)
        return pages.at[target].set(row_TX, mode="promise_in_bounds")

    return jax.tree.map(moved, leaf)
