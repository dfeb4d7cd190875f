"""Random sequences in pages, and their attention in float64."""

import jax.numpy as jnp
import numpy as np

from inference.benchmark.kernels.attention_case import exact
from layers import kv_cache
from layers.ragged import Ragged, Rectangle

_TABLE_TOKENS = 512
POOL_TOKENS = 6 * _TABLE_TOKENS + 128  # of every case, so that programs fit; some are nobody's


def seen(position: int, window: int | None, num_keys: int) -> np.ndarray:
    """bool[S]: what a token of a chain sees."""
    place_S = np.arange(num_keys)
    return (place_S <= position) & (place_S > position - (window or num_keys + position + 1))


def take_newest(pages, rectangle: Rectangle, head_width: int) -> tuple:
    """The keys and values of a rectangle's tokens, [C, W, K, H] each, and the token-major pages
    (with a poisoned sink) poisoned where they were.
    """
    C, W = rectangle.valid_CW.shape
    at = Ragged((rectangle,)).page_T(0, pages.shape[1])
    kv_CWXH = kv_cache.decode(pages[at]).reshape(C, W, -1, head_width)
    poisoned = pages.at[at].set(jnp.broadcast_to(pages[0, -1], pages[at].shape))
    return *jnp.split(kv_CWXH, 2, axis=2), poisoned


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
        ids = 1 + generator.permutation(POOL_TOKENS // page_tokens)
        pages = np.full((len(ids) + 1, page_tokens, 2 * K * H), np.nan, np.float32)
        # As the engine leaves them: a poisoned entry has a NaN key beside a value of 0.
        pages[..., K * H :] = 0
        self.table_CP = np.zeros((C, _TABLE_TOKENS // page_tokens), np.int32)
        for row, (n, (k, v)) in enumerate(zip(held, self.kv, strict=True)):
            own, ids = ids[:n], ids[n:]
            self.table_CP[row, :n] = own
            place = np.arange(lengths[row])
            entries = np.concatenate([k, v], axis=1).reshape(-1, 2 * K * H)
            pages[own[place // page_tokens], place % page_tokens] = entries
        stored = jnp.zeros(0, kv_cache.stored_dtype(dtype.name))
        self.pages = kv_cache.encode(jnp.asarray(pages), stored)
        self.dtype = dtype

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
        return self.q_CWNH.astype(self.dtype), self.pages, self.rectangle

    @property
    def contexts(self) -> tuple:
        """Keys and values of all sequences, [T, K, H] each, and where they belong."""
        C, S, shape = len(self.lengths), max(self.lengths), self.kv[0][0].shape[1:]
        kv = np.zeros((2, C, S, *shape))
        for row, own in enumerate(self.kv):
            kv[:, row, : self.lengths[row]] = own
        length_C1, place_S = np.array(self.lengths)[:, None], np.arange(S)
        position_CS = jnp.asarray(np.minimum(place_S, np.maximum(length_C1 - 1, 0)), jnp.int32)
        slot_C, valid_CS = jnp.arange(C, dtype=jnp.int32), jnp.asarray(place_S < length_C1)
        rectangle = Rectangle(slot_C, position_CS, valid_CS, (jnp.asarray(self.table_CP),))
        k_TKH, v_TKH = (jnp.asarray(x.reshape(C * S, *shape), self.dtype) for x in kv)
        return k_TKH, v_TKH, Ragged((rectangle,))

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

    def expected(
        self, window=None, cap=None, sinks_N=None, asked_CW=None
    ) -> tuple[np.ndarray, np.ndarray]:
        """[C, W, N, H] in float64 and the bound of the error that the dtype's rounding of the
        softmax's weights makes (and, small beside it, float32's of everything else), of the queries
        that are asked for: all that are valid, unless told.
        """
        out_CWNH, bound_CWNH = np.zeros(self.q_CWNH.shape), np.zeros(self.q_CWNH.shape)
        for row, w in np.argwhere(self.valid_CW if asked_CW is None else asked_CW):
            out_CWNH[row, w], size_NH = exact(
                self.q_CWNH[row, w], *self.kv[row], self._seen(row, w, window), cap, sinks_N
            )
            roundoff = float(jnp.finfo(self.dtype).eps) / 2
            bound_CWNH[row, w] = 2e-5 + roundoff * size_NH
        return out_CWNH, bound_CWNH

    def check(self, found_CWNH, window=None, cap=None, sinks_N=None, asked_CW=None) -> None:
        """Results within the bound: of every valid query, unless told."""
        asked_CW = self.valid_CW if asked_CW is None else asked_CW
        expected_CWNH, bound_CWNH = self.expected(window, cap, sinks_N, asked_CW)
        assert found_CWNH.dtype == np.float32
        error_CWNH = np.abs(np.asarray(found_CWNH, np.float64) - expected_CWNH)
        assert (error_CWNH <= bound_CWNH)[asked_CW].all(), (
            f"error {error_CWNH[asked_CW].max()}, "
            f"{(error_CWNH / np.maximum(bound_CWNH, 1e-9))[asked_CW].max()} of its bound"
        )
