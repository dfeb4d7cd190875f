"""Weights of the softmax that the end of a sequence gives to its tokens, and attention over a cache
that has given up pages, against float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import api
from layers.kernels.attention.contract import Options
from layers.ragged import Ragged, Rectangle
from layers.sparse.snap import ObservedPages
from tests import compiling
from tests.layers import native

pytestmark = pytest.mark.quick_code
LENGTH, WIDTH, PAGE, COLUMNS = 150, 5, 8, 32


class Case:
    """One sequence of 150 tokens on pages in random order among pages of NaN; its last 5 query."""

    def __init__(self, stored="float32", is_latent=False):
        rng, self.is_latent = np.random.default_rng(1), is_latent
        heads = (1, 12, 8) if is_latent else (2, 6, 6)
        self.format = PageFormat(*heads, is_latent, stored)
        self.q_WNH = rng.standard_normal((WIDTH, 4, heads[1])).astype(np.float32)
        row_TX = jnp.asarray(rng.standard_normal((LENGTH, self.format.row_width)), jnp.float32)
        if self.format.is_quantized:
            stored_TX = page_rows.quantize(row_TX, self.format)
            self.row_TX = page_rows.dequantize(stored_TX, self.format, jnp.float32)
        else:
            stored_TX = self.row_TX = row_TX
        self.table_P = np.zeros(COLUMNS, np.int32)
        num_pages = -(-LENGTH // PAGE)
        self.table_P[:num_pages] = 1 + rng.permutation(2 * COLUMNS)[:num_pages]
        poison = 255 if self.format.is_quantized else np.nan
        shape = 1 + 2 * COLUMNS, PAGE, self.format.stored_width
        pages = np.full(shape, poison, np.asarray(stored_TX).dtype)
        if not self.format.is_quantized:
            pages[..., self.format.values] = 9  # no page holds a NaN there (`packed_row`)
        for at, row in enumerate(np.asarray(stored_TX)):
            pages[self.table_P[at // PAGE], at % PAGE] = row
        self.pages = jnp.asarray(pages)

    def weights(self, cap=None, sinks_N=None, is_seen_S=True):
        """Softmax weights in float64, [W, N, S]."""
        k_SKH = np.asarray(self.row_TX, np.float64)[:, self.format.keys]
        k_SKH = k_SKH.reshape(LENGTH, self.format.kv_heads, -1)
        k_SNH = np.repeat(k_SKH, 4 // self.format.kv_heads, axis=1)
        scores = np.einsum("WNH,SNH->WNS", self.q_WNH.astype(np.float64), k_SNH)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        newest_W1 = (LENGTH - WIDTH + np.arange(WIDTH))[:, None]
        mask_WS = (np.arange(LENGTH) <= newest_W1) & is_seen_S
        weights = np.where(mask_WS[:, None], np.exp(scores), 0)
        sinks_N = np.full(4, -np.inf) if sinks_N is None else sinks_N
        return weights / (weights.sum(-1, keepdims=True) + np.exp(sinks_N)[None, :, None])

    def out(self, is_seen_S):
        """Attention in float64, [W, N, value width]."""
        v_SKH = np.asarray(self.row_TX, np.float64)[:, self.format.values]
        v_SKH = v_SKH.reshape(LENGTH, self.format.kv_heads, -1)
        v_SNH = np.repeat(v_SKH, 4 // self.format.kv_heads, axis=1)
        return np.einsum("WNS,SNH->WNH", self.weights(is_seen_S=is_seen_S), v_SNH)

    def rectangle(self, table_P, num_dropped=None):
        position_1W = jnp.arange(LENGTH - WIDTH, LENGTH, dtype=jnp.int32)[None]
        return Rectangle(
            jnp.zeros(1, jnp.int32), position_1W, jnp.ones((1, WIDTH), bool),
            (jnp.asarray(table_P)[None],),
            num_dropped_Y=None if num_dropped is None else jnp.array([num_dropped], jnp.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    "stored, is_latent, cap, has_sinks",
    [
        ("float32", False, None, False), ("float32", False, 2.0, True),
        ("float32", True, None, False), ("int8", False, None, False),
    ],
)  # fmt: skip
def test_weights_are_those_of_the_softmax(stored, is_latent, cap, has_sinks):
    case = Case(stored, is_latent)
    sinks_N = np.array([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    options = Options(score_cap=cap, sinks_N=None if sinks_N is None else jnp.asarray(sinks_N))
    leaf = ObservedPages(case.pages, jnp.ones(COLUMNS * PAGE))  # of an earlier layer
    arguments = case.rectangle(case.table_P), 0, case.format, options
    attend_pages = api.implementation("reference").attend_pages

    @compiling.jit
    def attend(q_1WNH):
        out, read = leaf.attend(attend_pages, q_1WNH, *arguments)
        assert read.pages is case.pages
        return out, attend_pages(q_1WNH, case.pages, *arguments), read.weight_S

    out, plain, weight_S = attend(case.q_WNH[None])
    np.testing.assert_array_equal(out, plain)
    expected_S = case.weights(cap, sinks_N).sum((0, 1))
    np.testing.assert_allclose(weight_S[:LENGTH] - 1, expected_S, atol=2e-6)
    np.testing.assert_array_equal(weight_S[LENGTH:], 1)


def test_a_window_observes_nothing():
    case, weight_S = Case(), jnp.zeros(COLUMNS * PAGE)
    attend_pages = api.implementation("reference").attend_pages
    _, leaf = ObservedPages(case.pages, weight_S).attend(
        attend_pages, jnp.asarray(case.q_WNH)[None], case.rectangle(case.table_P), 0, case.format,
        Options(window=20),
    )  # fmt: skip
    assert leaf.weight_S is weight_S


@pytest.mark.parametrize("name", ["reference", "ffi_cpu"])
@pytest.mark.parametrize("gone", [[1], [2, 3, 7, 11, 16], list(range(1, 17))])
def test_attention_over_what_stayed(name, gone):
    """Its pages moved together: as if all others were masked where they had been."""
    case = Case()
    if name == "ffi_cpu":
        native.need(case.format)
    stay = [page for page in range(-(-LENGTH // PAGE)) if page not in gone]
    table_P = np.zeros(COLUMNS, np.int32)
    table_P[: len(stay)] = case.table_P[stay]
    rectangle = case.rectangle(table_P, PAGE * len(gone))
    attend_pages = api.implementation(name).attend_pages
    told = {"group": 0, "page_format": case.format}
    found = compiling.call(attend_pages, case.q_WNH[None], case.pages, rectangle, **told)
    is_seen_S = ~np.isin(np.arange(LENGTH) // PAGE, gone)
    np.testing.assert_allclose(found[0], case.out(is_seen_S), atol=2e-5)


def test_tokens_are_written_where_the_gaps_closed():
    case = Case()
    table_P = np.arange(1, 1 + COLUMNS, dtype=np.int32)
    ragged = Ragged((case.rectangle(table_P, 3 * PAGE),))
    page_T, offset_T = ragged.page_T(0, PAGE)
    np.testing.assert_array_equal(page_T, 1 + (np.arange(145, 150) - 24) // PAGE)
    np.testing.assert_array_equal(offset_T, np.arange(145, 150) % PAGE)
    np.testing.assert_array_equal(ragged.position_T, np.arange(145, 150))
    page_T, _ = ragged.undropped.page_T(0, PAGE)
    np.testing.assert_array_equal(page_T, 1 + np.arange(145, 150) // PAGE)
