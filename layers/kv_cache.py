"""The device side of the cache: one leaf a layer, laid out by its `CacheSpec`.

Pages are token-major, [pages, page tokens, elements], unless the implementation of attention lays
its own out (`layers/kernels/attention/contract.py`). Page 0 and the last slot are sinks for
padding: nothing reads them. bfloat16 elements are kept as their bits in uint16: XLA's CPU backend
rewrites a whole bfloat16 array for every scatter and converts it to float32 for every gather,
integers stay in place.

A recurrent state is float32 [slots + 1, 1 + k, elements]: the state after position p lives at index
p mod (1 + k), so that the committed length alone names the state to read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from layers.kernels.device import has_free_views
from layers.ragged import Ragged

Cache = Any  # tuple with one array (or None, where a layer reads another's) a layer


def abstract(
    config: ModelConfig,
    num_pages: tuple[int, ...],
    page_tokens: int,
    max_seqs: int,
    num_drafts: int,
    layout: Callable[[int, int, int, int, str], jax.ShapeDtypeStruct] | None = None,
) -> Cache:
    """Shapes of the cache: `num_pages` counts each page group's pages, the sink included; `layout`
    is that of the chosen attention, None for any that is token-major.
    """

    def leaf(layer: int) -> jax.ShapeDtypeStruct | None:
        spec = config.cache_specs[layer]
        if spec.elements_per_token:
            pages = num_pages[config.group_of_layer[layer]], page_tokens
            if layout is not None and config.layers[layer].mixer == "attention":
                return layout(*pages, config.num_kv_heads, config.head_width, config.dtype)
            return token_major(*pages, spec.elements_per_token, config.dtype)
        if spec.elements_per_sequence:
            shape = (max_seqs + 1, 1 + num_drafts, spec.elements_per_sequence)
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        return None

    return tuple(leaf(layer) for layer in range(config.num_layers))


def init(*args: Any) -> Cache:
    """An empty cache; same arguments as `abstract`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract(*args))


def token_major(
    num_pages: int, page_tokens: int, elements: int, dtype: str
) -> jax.ShapeDtypeStruct:
    """Pages of one row of elements a token."""
    return jax.ShapeDtypeStruct((num_pages, page_tokens, elements), stored_dtype(dtype))


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


def write(pages: jax.Array, x_T: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """Stores the elements of each packed token, in place where `pages` is donated.

    `x_T` is [T, ...] of any shape: pages are seen in it, since XLA's CPU backend computes a reshape
    of the elements one by one, unless that would be a copy of the pages.
    """
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    if not has_free_views():
        x_T = x_T.reshape(-1, *pages.shape[2:])
    seen = pages.reshape(*pages.shape[:2], *x_T.shape[1:])
    seen = seen.at[page_T, offset_T].set(encode(x_T, pages), mode="promise_in_bounds")
    return seen.reshape(pages.shape)


def copy_pages(pages: jax.Array, source_X: jax.Array, target_X: jax.Array) -> jax.Array:
    """Copy-on-write: whole pages, before anything of the step is written. Sink to sink is a
    no-op.
    """
    return pages.at[target_X].set(pages[source_X], mode="promise_in_bounds")
