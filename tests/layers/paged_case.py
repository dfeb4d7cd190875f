"""Random sequences in pages, and their attention in float64."""

import jax.numpy as jnp
import numpy as np

from layers import kv_cache
from layers.ragged import Rectangle

_TABLE_TOKENS = 512
_POOL_TOKENS = 1600


def seen(position: int, window: int | None, num_keys: int) -> np.ndarray:
    """bool[S]: what a token of a chain sees."""
    place_S = np.arange(num_keys)
    return (place_S <= position) & (place_S > position - (window or num_keys + position + 1))


def exact(q_NH, k_SKH, v_SKH, seen_S, cap=None, sinks_N=None) -> tuple[np.ndarray, np.ndarray]:
    """One query in float64, head by head: its softmax over the keys it sees, and what the values
    would be if none were negative, to which rounding errors of the weights are relative.
    """
    out_NH, size_NH = np.zeros(q_NH.shape), np.zeros(q_NH.shape)
    group = q_NH.shape[0] // k_SKH.shape[1]
    for head, q_H in enumerate(q_NH):
        v_SH = v_SKH[seen_S, head // group]
        scores = k_SKH[seen_S, head // group] @ q_H
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        most = scores.max() if sinks_N is None else max(scores.max(), sinks_N[head])
        weights = np.exp(scores - most)
        mass = weights.sum() + (0 if sinks_N is None else np.exp(sinks_N[head] - most))
        out_NH[head], size_NH[head] = weights / mass @ v_SH, weights / mass @ np.abs(v_SH)
    return out_NH, size_NH


class Case:
    """Random sequences of the given lengths, their pages in random order among poisoned ones; the
    queries are their last `width` tokens, fewer where a sequence is shorter.

    With `trees` those tokens are random trees of drafts, with `canvases` they see each other.
    """

    def __init__(
        self, lengths, heads, page_tokens, width, dtype="float32", seed=0, head_width=10, scale=1.0,
        trees=False, canvases=False,
    ):  # fmt: skip
        generator, H = np.random.default_rng(seed), head_width
        self.lengths, self.page_tokens, self.trees, self.canvases = (
            lengths,
            page_tokens,
            trees,
            canvases,
        )
        N, K = heads
        C, dtype = len(lengths), np.dtype(jnp.dtype(dtype))
        length_C1 = np.array(lengths)[:, None]
        self.start_C1 = np.maximum(length_C1 - width, 0)
        self.valid_CW = self.start_C1 + np.arange(width) < length_C1
        # Of each query its parent among the row's tokens; a chain is the tree without branches.
        self.parent_CW = np.tile(np.arange(width) - 1, (C, 1))
        if trees:
            self.parent_CW[:, 1:] = generator.integers(0, np.arange(1, width), (C, width - 1))
        depth_CW = np.zeros((C, width), np.int32)
        for w in range(1, width):
            depth_CW[:, w] = 1 + depth_CW[np.arange(C), self.parent_CW[:, w]]
        position_CW = np.where(self.valid_CW, self.start_C1 + depth_CW, 0)
        self.position_CW = np.where(self.valid_CW, position_CW, position_CW.max()).astype(np.int32)

        def draw(*shape: int, scale=1.0) -> np.ndarray:
            return (generator.standard_normal(shape) * scale).astype(dtype).astype(np.float64)

        self.q_CWNH = draw(C, width, N, H, scale=scale)
        self.kv = [(draw(n, K, H), draw(n, K, H)) for n in lengths]
        held = [-(-n // page_tokens) for n in lengths]
        ids = 1 + generator.permutation(_POOL_TOKENS // page_tokens)
        pages = np.full((len(ids) + 1, page_tokens, 2 * K * H), np.nan, np.float32)
        # As the engine leaves them: a poisoned entry has a NaN key beside a value of 0.
        pages[..., K * H :] = 0
        self.table_CP = np.zeros((C, _TABLE_TOKENS // page_tokens), np.int32)
        for row, (n, (k, v)) in enumerate(zip(held, self.kv, strict=True)):
            own, ids = ids[:n], ids[n:]
            self.table_CP[row, :n] = own
            for place in range(lengths[row]):
                page, offset = own[place // page_tokens], place % page_tokens
                pages[page, offset] = np.concatenate([k[place].ravel(), v[place].ravel()])
        stored = jnp.zeros(0, kv_cache.stored_dtype(dtype.name))
        self.pages = kv_cache.encode(jnp.asarray(pages), stored)
        self._dtype = dtype

    def _ancestors(self, row: int, w: int) -> list[int]:
        """The query itself and what it follows from, among the row's tokens."""
        found = [w]
        while found[-1]:
            found.append(self.parent_CW[row, found[-1]])
        return found

    @property
    def rectangle(self) -> Rectangle:
        C, W = self.valid_CW.shape
        ancestors_CW = causal_C = None
        if self.trees:
            bits = [[sum(1 << int(a) for a in self._ancestors(c, w)) for w in range(W)]
                    for c in range(C)]  # fmt: skip
            ancestors_CW = jnp.array(bits, jnp.uint32)
        if self.canvases:
            causal_C = jnp.zeros(C, bool)
        slot_C, tables = jnp.arange(C, dtype=jnp.int32), (jnp.asarray(self.table_CP),)
        position_CW, valid_CW = jnp.asarray(self.position_CW), jnp.asarray(self.valid_CW)
        return Rectangle(slot_C, position_CW, valid_CW, tables, ancestors_CW, causal_C)

    @property
    def arguments(self) -> tuple:
        """The first three of `attend_pages`; the group is 0."""
        return self.q_CWNH.astype(self._dtype), self.pages, self.rectangle

    def _seen(self, row: int, w: int, window: int | None) -> np.ndarray:
        """bool[S] of the sequence's places."""
        start, length = int(self.start_C1[row, 0]), self.lengths[row]
        position_S = np.arange(length)
        own = slice(start, length)
        position_S[own] = self.position_CW[row, : length - start]
        seen_S = position_S < start
        seen_S[own] = False
        others = range(length - start) if self.canvases else self._ancestors(row, w)
        seen_S[[start + other for other in others]] = True
        if window is not None:
            seen_S &= position_S > self.position_CW[row, w] - window
        return seen_S

    def expected(self, window=None, cap=None, sinks_N=None) -> tuple[np.ndarray, np.ndarray]:
        """[C, W, N, H] in float64 and the bound of the error that the dtype's rounding of the
        softmax's weights makes (and, small beside it, float32's of everything else).
        """
        out_CWNH, bound_CWNH = np.zeros(self.q_CWNH.shape), np.zeros(self.q_CWNH.shape)
        for row, w in np.argwhere(self.valid_CW):
            out_CWNH[row, w], size_NH = exact(
                self.q_CWNH[row, w], *self.kv[row], self._seen(row, w, window), cap, sinks_N
            )
            roundoff = float(jnp.finfo(self._dtype).eps) / 2
            bound_CWNH[row, w] = 2e-5 + roundoff * size_NH
        return out_CWNH, bound_CWNH

    def check(self, found_CWNH, window=None, cap=None, sinks_N=None) -> None:
        """Every valid query's result within the bound; none is compared where there is none."""
        expected_CWNH, bound_CWNH = self.expected(window, cap, sinks_N)
        assert found_CWNH.dtype == np.float32
        error_CWNH = np.abs(np.asarray(found_CWNH, np.float64) - expected_CWNH)
        assert (error_CWNH <= bound_CWNH)[self.valid_CW].all(), (
            f"error {error_CWNH[self.valid_CW].max()}, "
            f"{(error_CWNH / np.maximum(bound_CWNH, 1e-9))[self.valid_CW].max()} of its bound"
        )
