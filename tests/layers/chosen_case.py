"""Two sequences whose queries choose what they read, for tests of what chooses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from layers import decoder, kv_cache
from layers.ragged import Ragged, Rectangle
from tests import compiling

TOKENS = np.random.default_rng(2).integers(0, 31, (2, 150))
LENGTHS = 150, 41


def _spoiled(leaf, added):
    """All of a layer's pages of entries; of others what queries choose by."""
    if isinstance(leaf, kv_cache.Pooled):
        return jax.tree.map(lambda pages: pages + added, leaf)
    return dataclasses.replace(leaf, index=leaf.index + added)


@functools.cache
def _program(own, num_rows, page, columns, told):
    """One step of the last rows: whoever asks for the same shares what is compiled."""
    table = 1 + np.arange(2 * columns, dtype=np.int32).reshape(2, columns)

    @compiling.jit
    def run(weights, tokens_YW, position_YW, valid_YW, cache):
        rows = jnp.arange(2 - num_rows, 2)
        tables = (jnp.asarray(table)[rows],) * len(own.page_groups)
        rectangle = Rectangle(rows, position_YW[rows], valid_YW[rows], tables)
        # Fillers, as the engine has them: products of few rows sum in other orders.
        tokens_T = jnp.pad(tokens_YW[rows].ravel(), (0, 8))
        ragged = Ragged((rectangle,), 8)
        hidden_TD, cache = decoder.forward(
            weights, own, tokens_T, ragged, cache, deterministic=True, **dict(told)
        )
        return decoder.logits(weights, own, hidden_TD), cache

    return run


def decoded(own, weights, num_rows, spoiled=None, chunk=149, **told):
    """Logits of the last token of each row, decoded behind a prompt that is fed in chunks, bits
    independent of rectangles; both rows have their own pages. `told` is the decoder's.
    """
    page, columns = 16, 16
    cache = kv_cache.init(own, (1 + 2 * columns,) * len(own.page_groups), page, 2, 0)
    if spoiled is not None:  # what earlier owners left in pages
        cache = tuple(_spoiled(leaf, spoiled) for leaf in cache)
    run = _program(own, num_rows, page, columns, tuple(told.items()))
    for start in range(0, 149, chunk):
        at = np.arange(start, start + chunk)
        position_YW = np.stack([np.minimum(at, n - 2) for n in LENGTHS]).astype(np.int32)
        valid_YW = np.stack([at < n - 1 for n in LENGTHS])
        tokens_YW = TOKENS[:, np.minimum(at, 149)]
        _, cache = run(weights, tokens_YW, position_YW, valid_YW, cache)
    last = np.array([[n - 1] for n in LENGTHS], np.int32)
    tokens = np.take_along_axis(TOKENS, last, axis=1)
    return np.asarray(run(weights, tokens, last, np.ones((2, 1), bool), cache)[0])[:num_rows]
