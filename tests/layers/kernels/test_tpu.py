"""What the TPU kernel does beyond the suite of `test_attention.py`: append and wait; and how jax's
own is called.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from configs.cache import keys_values, latent
from configs.errors import InputError
from layers import page_rows
from layers.kernels.attention import jax_tpu, reference, tpu
from layers.kernels.attention.contract import Options
from layers.ragged import Ragged, Rectangle
from tests import compiling
from tests.layers import paged_case

pytestmark = pytest.mark.quick_code

_PAGE = 32
_INTERPRETER = pltpu.InterpretParams(detect_races=True)
_append = functools.partial(compiling.call, tpu.append_and_attend, interpret=_INTERPRETER)
_expected = functools.partial(compiling.call, reference.attend_pages)


def _rows(starts, counts, sequences, width: int, num_sequences: int):
    """Rows of W tokens, of them the first are valid, each from a KV position on."""
    nth_W, starts, counts = np.arange(width), np.array(starts), np.array(counts)
    position_YW = starts[:, None] + np.minimum(nth_W, np.maximum(counts[:, None] - 1, 0))
    pages_of_sequence = 1 + np.arange(num_sequences * 16).reshape(num_sequences, 16)
    table_YP = np.random.default_rng(0).permutation(pages_of_sequence.ravel())
    table_YP = table_YP.reshape(num_sequences, 16)[np.array(sequences)] + 1
    table_YP[counts == 0] = 0
    valid_YW = jnp.asarray(nth_W < counts[:, None])
    slot_Y = jnp.asarray(sequences, jnp.int32)
    position_YW, table_YP = jnp.asarray(position_YW, jnp.int32), jnp.asarray(table_YP, jnp.int32)
    return Rectangle(slot_Y, position_YW, valid_YW, (table_YP,))


_ROWS = {  # where rows start, their tokens, whose they are, W
    "decode": ([0, 31, 32, 100, 47, 0], [1, 1, 1, 1, 1, 0], [0, 1, 2, 3, 4, 5], 1),
    "drafts": ([14, 30, 77, 200, 0, 3], [5, 3, 5, 1, 0, 2], [0, 1, 2, 3, 4, 5], 5),
    "tiles of one prompt": ([37, 61, 85, 109], [24, 24, 24, 7], [0, 0, 0, 0], 24),
    "tiles among others": ([0, 200, 24, 224, 48], [24, 24, 24, 9, 1], [0, 1, 0, 1, 0], 24),
}


@functools.cache
def _drawn(rows: str, dtype=jnp.bfloat16, heads=(4, 2), head_width=64, rank=0):
    """Queries and packed rows of new tokens, pages full of others' before and after those are
    written, the rectangle, and what implementations are told of group and format. With `rank` all
    heads read a latent of so many elements, the first of `head_width`.
    """
    starts, counts, sequences, width = _ROWS[rows]
    rectangle = _rows(starts, counts, sequences, width, max(sequences) + 1)
    generator, (N, K), H = np.random.default_rng(1), heads, head_width
    draw = lambda *shape: generator.standard_normal(shape).astype(dtype)  # noqa: E731
    spec = latent(rank, H - rank) if rank else keys_values(K, H)
    page_format = spec.page_format(jnp.dtype(dtype).name)
    pages = page_rows.in_lanes(16 * (max(sequences) + 1) + 2, _PAGE, page_format)
    stored = np.array(page_rows.encode(draw(*pages.shape), pages))
    stored[..., page_format.row_width :] = 0
    T, shape = len(starts) * width, (len(starts), width)
    row_TX = draw(T, H) if rank else np.concatenate([draw(T, K, H), draw(T, K, H)], axis=1)
    written = compiling.call(page_rows.write, stored, row_TX, Ragged((rectangle,)), group=0)
    written = np.asarray(written)
    row_YWX = row_TX.reshape(*shape, *row_TX.shape[1:])
    told = {"group": 0, "page_format": page_format}
    return draw(*shape, N, H) / 8, row_YWX, stored, written, rectangle, told


def _check(found, expected, rectangle, atol):
    valid_YW = np.asarray(rectangle.valid_YW)
    np.testing.assert_allclose(
        np.asarray(found)[valid_YW], np.asarray(expected)[valid_YW], atol=atol
    )


_LATENTS = {"heads": (6, 1), "head_width": 200, "rank": 128}


_KINDS = {"keys and values": {}, "latents": _LATENTS}
# Each two of kind, rows and window meet; the other half of the product is long.
_APPENDED = [
    pytest.param(kind, rows, window, marks=() if (i + n + w) % 2 == 0 else pytest.mark.long)
    for i, kind in enumerate(_KINDS) for n, rows in enumerate(_ROWS)
    for w, window in enumerate((None, 40))
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rows", "window"), _APPENDED)
def test_appended_tokens_are_where_xla_writes_them_and_are_seen(kind, rows, window, monkeypatch):
    """In blocks of a page, and in a ring that is full most of the time."""
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 1)
    q, row_YWX, held, written, rectangle, told = _drawn(rows, **_KINDS[kind])
    told = told | {"options": Options(window)}
    found, pages = map(np.asarray, _append(q, row_YWX, held, rectangle, **told))
    assert not interpret_pallas_call.races.races_found
    np.testing.assert_array_equal(pages[1:], written[1:])
    np.testing.assert_array_equal(pages[0], held[0])  # no padding is stored
    _check(found, _expected(q, written, rectangle, **told), rectangle, 2e-2)
    read = compiling.call(tpu.attend_pages, q, written, rectangle, **told, interpret=_INTERPRETER)
    np.testing.assert_array_equal(read, found)


def test_a_row_of_many_tokens_is_several(monkeypatch):
    """Each sees what those before it append."""
    monkeypatch.setattr(tpu, "_TILE_BYTES", 80_000)
    q, row_YWX, held, written, rectangle, told = _drawn("tiles of one prompt", jnp.float32)
    found, pages = map(np.asarray, _append(q, row_YWX, held, rectangle, **told))
    np.testing.assert_array_equal(pages[1:], written[1:])
    _check(found, _expected(q, written, rectangle, **told), rectangle, 2e-5)


def test_only_rows_of_one_sequence_wait():
    """Sharing a prefix is no reason to."""
    table_ZP = jnp.array([[3, 4, 0], [3, 5, 0], [3, 4, 6], [0, 0, 0]])
    column_Z, count_Z = jnp.array([1, 1, 2, 0]), jnp.array([2, 2, 2, 0])
    assert tpu._waits(table_ZP, column_Z, count_Z).tolist() == [0, 0, 1, 0]


def test_rows_without_pages_are_passed_over():
    assert tpu._next(jnp.array([False, True, False, False, True])).tolist() == [1, 1, 4, 4, 4, 5]
    q, row_YWX, held, _, rectangle, told = _drawn("decode")
    nobody = dataclasses.replace(rectangle, valid_YW=jnp.zeros_like(rectangle.valid_YW))
    found, pages = _append(q, row_YWX, held, nobody, **told)
    assert not np.asarray(found).any()
    np.testing.assert_array_equal(pages, held)


# --- jax's own ------------------------------------------------------------------------------------


def _stand_in(*args, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, **options):
    """What its authors test the kernel against; no interpreter runs the kernel itself. Lengths are
    known while it is traced.
    """
    q_TNH, pages, lengths, table, starts, num_rows = args
    lengths, starts, num_rows = map(np.asarray, (lengths, starts, num_rows))

    @compiling.jit
    def attend(q_TNH, pages, table):
        return kernel.ref_ragged_paged_attention(
            q_TNH, pages, lengths, table, starts, num_rows, **options
        )

    return attend(q_TNH, pages, table)


def _interleaved(pages: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Token-major pages as `jax_tpu` lays them out."""
    halves = np.asarray(page_rows.decode(pages)).reshape(*pages.shape[:2], 2, num_kv_heads, -1)
    return halves.swapaxes(2, 3).reshape(*pages.shape[:2], 2 * num_kv_heads, -1)


@pytest.mark.parametrize(("rows", "cap"), [*((rows, None) for rows in _ROWS), ("drafts", 2.0)])
def test_jax_kernel_is_told_of_valid_tokens_only(rows, cap, monkeypatch):
    monkeypatch.setattr(kernel, "ragged_paged_attention", _stand_in)
    q, row_YWX, held, written, rectangle, told = _drawn(rows, head_width=128)
    row_TX, ragged = row_YWX.reshape(-1, *row_YWX.shape[2:]), Ragged((rectangle,))
    pages = compiling.call(jax_tpu.write, _interleaved(held, 2), row_TX, ragged, group=0)
    np.testing.assert_array_equal(np.asarray(pages)[1:], _interleaved(written, 2)[1:])
    assert pages.shape == jax_tpu.layout(len(held), _PAGE, told["page_format"]).shape
    told = told | {"options": Options(score_cap=cap)}
    found = jax_tpu.attend_pages(q, pages, rectangle, **told)
    assert found.dtype == jnp.float32
    _check(found, _expected(q, written, rectangle, **told), rectangle, 3e-2)  # it rounds, too


def test_what_jax_kernel_does_not_know_is_refused():
    case = paged_case.Case((70,), (4, 2), 64, 4, trees=True)
    q, pages, rectangle = case.arguments
    with pytest.raises(InputError, match="'jax_tpu' knows no windows, .* 'pallas_tpu' does"):
        jax_tpu.attend_pages(q, pages, rectangle, 0, case.page_format)
