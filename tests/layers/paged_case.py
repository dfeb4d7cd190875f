"""Random sequences in pages, and their attention in float64."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from configs.cache import PageFormat
from inference.benchmark.kernels.attention_case import exact
from layers import page_rows
from layers.kernels.attention.contract import Options
from layers.ragged import Ragged, Rectangle
from tests.layers import quantized_rows

_TABLE_TOKENS = 512
POOL_TOKENS = 6 * _TABLE_TOKENS + 128  # of every case, so that programs fit; some are nobody's


class Sight(NamedTuple):
    """More than a window that slides, wherever one is asked for."""

    window: int | None
    chunked: bool = False
    first_tokens: int = 0

    def sees(self, query: int, position_S: np.ndarray) -> np.ndarray:
        """Which positions, of those up to its own."""
        if self.chunked:
            return position_S >= query // self.window * self.window
        is_near_S = position_S > query - (self.window or query + 1)
        return is_near_S | (position_S < self.first_tokens)


def sight(window: int | None | Sight) -> Sight:
    return window if isinstance(window, Sight) else Sight(window)


def options(window, cap=None, sinks_N=None, deterministic=False) -> Options:
    return Options(sight(window).window, cap, sinks_N, deterministic, *sight(window)[1:])


def seen(position: int, window: int | None, num_keys: int) -> np.ndarray:
    """bool[S]: what a token of a chain sees."""
    kv_position_S = np.arange(num_keys)
    return (kv_position_S <= position) & (
        kv_position_S > position - (window or num_keys + position + 1)
    )


def take_newest(pages, rectangle: Rectangle) -> tuple:
    """The packed rows of a rectangle's tokens, [Y, W, 2 K H], and the token-major pages (with a
    poisoned sink) poisoned where they were.
    """
    Y, W = rectangle.valid_YW.shape
    at = Ragged((rectangle,)).page_T(0, pages.shape[1])
    row_YWX = page_rows.decode(pages[at]).reshape(Y, W, -1)
    poisoned = pages.at[at].set(jnp.broadcast_to(pages[0, -1], pages[at].shape))
    return row_YWX, poisoned


class Case:
    """Random sequences of the given lengths, their pages in random order among poisoned ones; the
    queries are their last `width` tokens, fewer where a sequence is shorter.

    With `trees` those tokens are random trees of drafts, with `canvases` they see each other; pages
    have `dtype`, or the `stored` format, whose numbers `rounds` brings to `dtype`.
    """

    def __init__(
        self, lengths, heads, page_tokens, width, dtype="float32", seed=0, head_width=10, scale=1.0,
        trees=False, canvases=False, value_width=None, values_in_keys=False, stored=None,
        rounds=True,
    ):  # fmt: skip
        generator, H = np.random.default_rng(seed), head_width
        self.lengths, self.page_tokens, self.trees, self.canvases = (
            lengths,
            page_tokens,
            trees,
            canvases,
        )
        N, K = heads
        Y, dtype = len(lengths), np.dtype(jnp.dtype(dtype))
        format = stored or dtype.name
        self.page_format = PageFormat(K, H, value_width or H, values_in_keys, format)
        length_Y1 = np.array(lengths)[:, None]
        self.start_Y1 = np.maximum(length_Y1 - width, 0)
        self.valid_YW = self.start_Y1 + np.arange(width) < length_Y1
        # Of each query its parent among the row's tokens; a chain is the tree without branches.
        self.parent_YW = np.tile(np.arange(width) - 1, (Y, 1))
        if trees:
            self.parent_YW[:, 1:] = generator.integers(0, np.arange(1, width), (Y, width - 1))
        depth_YW = np.zeros((Y, width), np.int32)
        for w in range(1, width):
            depth_YW[:, w] = 1 + depth_YW[np.arange(Y), self.parent_YW[:, w]]
        position_YW = np.where(self.valid_YW, self.start_Y1 + depth_YW, 0)
        self.position_YW = np.where(self.valid_YW, position_YW, position_YW.max()).astype(np.int32)

        def draw(*shape: int, scale=1.0) -> np.ndarray:
            return (generator.standard_normal(shape) * scale).astype(dtype).astype(np.float64)

        self.q_YWNH = draw(Y, width, N, H, scale=scale)
        self.kv = [self._draw_kv(draw, n) for n in lengths]
        held = [-(-n // page_tokens) for n in lengths]
        ids = 1 + generator.permutation(POOL_TOKENS // page_tokens)
        shape = len(ids) + 1, page_tokens, self.page_format.row_width
        pages = np.full(shape, np.nan, np.float32)
        # As the engine leaves them: a poisoned entry has a NaN key beside a value of 0.
        pages[..., self.page_format.values] = 0
        self.table_YP = np.zeros((Y, _TABLE_TOKENS // page_tokens), np.int32)
        for row, n in enumerate(held):
            own, ids = ids[:n], ids[n:]
            self.table_YP[row, :n] = own
            kv_position = np.arange(lengths[row])
            pages[own[kv_position // page_tokens], kv_position % page_tokens] = self._rows(row)
        self.dtype = dtype
        if stored is None:
            self.pages = page_rows.encode(
                jnp.asarray(pages), jnp.zeros(0, page_rows.stored_dtype(dtype.name))
            )
            return
        bytes_TX = page_rows.quantize(jnp.asarray(pages.reshape(-1, shape[-1])), self.page_format)
        self.pages = bytes_TX.reshape(*shape[:-1], -1)
        self.kv = [self._parts(self._read(row, rounds)) for row in range(len(lengths))]

    def _read(self, row: int, rounds: bool) -> np.ndarray:
        """Packed rows of a sequence as numbers, read from quantized ones."""
        found = quantized_rows.numbers(self._rows(row), self.page_format)
        return found.astype(np.float32).astype(self.dtype).astype(np.float64) if rounds else found

    def _parts(self, row_TX: np.ndarray) -> tuple:
        """Keys [n, K, key width] and values [n, K, value width] of packed rows."""
        K = self.page_format.kv_heads
        keys, values = row_TX[:, self.page_format.keys], row_TX[:, self.page_format.values]
        return tuple(x.reshape(len(x), K, x.shape[1] // K) for x in (keys, values))

    def _draw_kv(self, draw, n: int) -> tuple:
        """Keys [n, K, key width] and values [n, K, value width]."""
        K, key_width, value_width, values_in_keys, *_ = dataclasses.astuple(self.page_format)
        keys = draw(n, K, key_width)
        return keys, keys[..., :value_width] if values_in_keys else draw(n, K, value_width)

    def _rows(self, row: int) -> np.ndarray:
        """Packed rows of a sequence."""
        keys, values = (x.reshape(len(x), math.prod(x.shape[1:])) for x in self.kv[row])
        return keys if self.page_format.values_in_keys else np.concatenate([keys, values], axis=1)

    def _ancestors(self, row: int, w: int) -> list[int]:
        """The query itself and what it follows from, among the row's tokens."""
        found = [w]
        while found[-1]:
            found.append(self.parent_YW[row, found[-1]])
        return found

    @property
    def rectangle(self) -> Rectangle:
        Y, W = self.valid_YW.shape
        ancestors_YW = causal_Y = None
        if self.trees:
            bits = [[sum(1 << int(a) for a in self._ancestors(c, w)) for w in range(W)]
                    for c in range(Y)]  # fmt: skip
            ancestors_YW = jnp.array(bits, jnp.uint32)
        if self.canvases:
            causal_Y = jnp.zeros(Y, bool)
        slot_Y, tables = jnp.arange(Y, dtype=jnp.int32), (jnp.asarray(self.table_YP),)
        position_YW, valid_YW = jnp.asarray(self.position_YW), jnp.asarray(self.valid_YW)
        return Rectangle(slot_Y, position_YW, valid_YW, tables, ancestors_YW, causal_Y)

    @property
    def arguments(self) -> tuple:
        """The first three of `attend_pages`; then come a group of 0 and the page format."""
        return self.q_YWNH.astype(self.dtype), self.pages, self.rectangle

    @property
    def contexts(self) -> tuple:
        """Packed rows of all sequences' tokens, [T, X], and where they belong."""
        Y, S = len(self.lengths), max(self.lengths)
        row_YSX = np.zeros((Y, S, self.page_format.row_width))
        for row, length in enumerate(self.lengths):
            row_YSX[row, :length] = self._rows(row)
        length_Y1, kv_position_S = np.array(self.lengths)[:, None], np.arange(S)
        position_YS = jnp.asarray(
            np.minimum(kv_position_S, np.maximum(length_Y1 - 1, 0)), jnp.int32
        )
        slot_Y, valid_YS = jnp.arange(Y, dtype=jnp.int32), jnp.asarray(kv_position_S < length_Y1)
        rectangle = Rectangle(slot_Y, position_YS, valid_YS, (jnp.asarray(self.table_YP),))
        return jnp.asarray(row_YSX.reshape(Y * S, -1), self.dtype), Ragged((rectangle,))

    def _seen(self, row: int, w: int, window: int | None | Sight) -> np.ndarray:
        """bool[S] of the sequence's KV positions."""
        start, length = int(self.start_Y1[row, 0]), self.lengths[row]
        position_S = np.arange(length)
        own = slice(start, length)
        position_S[own] = self.position_YW[row, : length - start]
        seen_S = position_S < start
        seen_S[own] = False
        others = range(length - start) if self.canvases else self._ancestors(row, w)
        seen_S[[start + other for other in others]] = True
        return seen_S & sight(window).sees(self.position_YW[row, w], position_S)

    def expected(
        self, window=None, cap=None, sinks_N=None, asked_YW=None
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Y, W, N, value width] in float64 and the bound of the error that the dtype's rounding of
        the softmax's weights makes (and, small beside it, float32's of everything else), of the
        queries that are asked for: all that are valid, unless told.
        """
        shape = *self.q_YWNH.shape[:3], self.page_format.value_width
        out_YWNH, bound_YWNH = np.zeros(shape), np.zeros(shape)
        for row, w in np.argwhere(self.valid_YW if asked_YW is None else asked_YW):
            out_YWNH[row, w], size_NH = exact(
                self.q_YWNH[row, w], *self.kv[row], self._seen(row, w, window), cap, sinks_N
            )
            roundoff = float(jnp.finfo(self.dtype).eps) / 2
            bound_YWNH[row, w] = 2e-5 + roundoff * size_NH
        return out_YWNH, bound_YWNH

    def check(
        self, found_YWNH, window=None, cap=None, sinks_N=None, asked_YW=None, is_rounded=False
    ) -> None:
        """Results within the bound: of every valid query, unless told. `is_rounded`: to the dtype
        of the queries, as the next product reads them.
        """
        asked_YW = self.valid_YW if asked_YW is None else asked_YW
        expected_YWNH, bound_YWNH = self.expected(window, cap, sinks_N, asked_YW)
        if is_rounded:
            bound_YWNH += float(jnp.finfo(self.dtype).eps) / 2 * np.abs(expected_YWNH)
        assert found_YWNH.dtype == np.float32
        error_YWNH = np.abs(np.asarray(found_YWNH, np.float64) - expected_YWNH)
        assert (error_YWNH <= bound_YWNH)[asked_YW].all(), (
            f"error {error_YWNH[asked_YW].max()}, "
            f"{(error_YWNH / np.maximum(bound_YWNH, 1e-9))[asked_YW].max()} of its bound"
        )
