"""Random sequences in pages, and their attention in float64."""

import jax.numpy as jnp
import numpy as np

from layers import kv_cache
from layers.ragged import Rectangle

_TABLE_TOKENS = 512
_POOL_TOKENS = 1600


def exact(q_NH, k_SKH, v_SKH, position: int, window: int | None, cap=None) -> np.ndarray:
    """One query in float64: softmax over the keys it sees, head by head."""
    first = 0 if window is None else max(0, position + 1 - window)
    out_NH = np.zeros(q_NH.shape)
    group = q_NH.shape[0] // k_SKH.shape[1]
    for head, q_H in enumerate(q_NH):
        scores = k_SKH[first : position + 1, head // group] @ q_H
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out_NH[head] = weights / weights.sum() @ v_SKH[first : position + 1, head // group]
    return out_NH


class Case:
    """Random sequences of the given lengths, their pages in random order among poisoned ones; the
    queries are their last `width` tokens.
    """

    def __init__(self, lengths, heads, page_tokens, width, dtype="float32", seed=0, head_width=10):
        generator, H = np.random.default_rng(seed), head_width
        self.lengths, self.page_tokens = lengths, page_tokens
        N, K = heads
        self.position_CW = np.maximum(np.array(lengths)[:, None] - width + np.arange(width), 0)
        self.valid_CW = np.array(lengths)[:, None] - width + np.arange(width) >= 0

        def draw(*shape: int) -> np.ndarray:
            return generator.standard_normal(shape).astype(dtype).astype(np.float64)

        dtype = np.dtype(jnp.dtype(dtype))
        self.q_CWNH = draw(len(lengths), width, N, H)
        self.kv = [(draw(n, K, H), draw(n, K, H)) for n in lengths]
        held = [-(-n // page_tokens) for n in lengths]
        ids = 1 + generator.permutation(_POOL_TOKENS // page_tokens)
        pages = np.full((len(ids) + 1, page_tokens, 2 * K * H), np.nan, np.float32)
        # As the engine leaves them: a poisoned entry has a NaN key beside a value of 0.
        pages[..., K * H :] = 0
        self.table_CP = np.zeros((len(lengths), _TABLE_TOKENS // page_tokens), np.int32)
        for row, (n, (k, v)) in enumerate(zip(held, self.kv, strict=True)):
            own, ids = ids[:n], ids[n:]
            self.table_CP[row, :n] = own
            for position in range(lengths[row]):
                page, offset = own[position // page_tokens], position % page_tokens
                pages[page, offset] = np.concatenate([k[position].ravel(), v[position].ravel()])
        stored = jnp.zeros(0, kv_cache.stored_dtype(dtype.name))
        self.pages = kv_cache.encode(jnp.asarray(pages), stored)
        self._dtype = dtype

    @property
    def rectangle(self) -> Rectangle:
        slot_C = jnp.arange(len(self.lengths), dtype=jnp.int32)
        position_CW, valid_CW = jnp.asarray(self.position_CW), jnp.asarray(self.valid_CW)
        return Rectangle(slot_C, position_CW, valid_CW, (jnp.asarray(self.table_CP),))

    @property
    def arguments(self) -> tuple:
        """The first three of `attend_pages`; the group is 0."""
        return self.q_CWNH.astype(self._dtype), self.pages, self.rectangle

    def expected(self, window, cap=None) -> np.ndarray:
        """[C, W, N, H] in float64, 0 where a row has no token."""
        out_CWNH = np.zeros(self.q_CWNH.shape)
        for row, w in np.argwhere(self.valid_CW):
            out_CWNH[row, w] = exact(
                self.q_CWNH[row, w], *self.kv[row], self.position_CW[row, w], window, cap
            )
        return out_CWNH
