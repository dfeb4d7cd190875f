"""What the TPU kernel does beyond the suite of `test_attention.py`: append and wait; and how jax's
own is called.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from configs.errors import InputError
from layers import kv_cache
from layers.kernels.attention import jax_tpu, reference, tpu
from layers.kernels.attention.contract import Options
from layers.ragged import Ragged, Rectangle
from tests.layers import paged_case

_PAGE = 32
_INTERPRETER = pltpu.InterpretParams(detect_races=True)


def _rows(starts, counts, sequences, width: int, num_sequences: int):
    """Rows of W tokens, of them the first are valid, each from a place of a sequence on."""
    nth_W, starts, counts = np.arange(width), np.array(starts), np.array(counts)
    position_CW = starts[:, None] + np.minimum(nth_W, np.maximum(counts[:, None] - 1, 0))
    pages_of_sequence = 1 + np.arange(num_sequences * 16).reshape(num_sequences, 16)
    table_CP = np.random.default_rng(0).permutation(pages_of_sequence.ravel())
    table_CP = table_CP.reshape(num_sequences, 16)[np.array(sequences)] + 1
    table_CP[counts == 0] = 0
    valid_CW = jnp.asarray(nth_W < counts[:, None])
    slot_C = jnp.asarray(sequences, jnp.int32)
    position_CW, table_CP = jnp.asarray(position_CW, jnp.int32), jnp.asarray(table_CP, jnp.int32)
    return Rectangle(slot_C, position_CW, valid_CW, (table_CP,))


_ROWS = {  # where rows start, their tokens, whose they are, W
    "decode": ([0, 31, 32, 100, 47, 0], [1, 1, 1, 1, 1, 0], [0, 1, 2, 3, 4, 5], 1),
    "drafts": ([14, 30, 77, 200, 0, 3], [5, 3, 5, 1, 0, 2], [0, 1, 2, 3, 4, 5], 5),
    "tiles of one prompt": ([37, 61, 85, 109], [24, 24, 24, 7], [0, 0, 0, 0], 24),
    "tiles among others": ([0, 200, 24, 224, 48], [24, 24, 24, 9, 1], [0, 1, 0, 1, 0], 24),
}


def _drawn(rows: str, dtype=jnp.bfloat16, heads=(4, 2), head_width=64):
    """Queries, keys and values of the rows, and pages full of others'."""
    starts, counts, sequences, width = _ROWS[rows]
    rectangle = _rows(starts, counts, sequences, width, max(sequences) + 1)
    generator, (N, K), H = np.random.default_rng(1), heads, head_width
    draw = lambda *shape: jnp.asarray(generator.standard_normal(shape), dtype)  # noqa: E731
    pages = reference.layout(16 * (max(sequences) + 1) + 2, _PAGE, K, H, jnp.dtype(dtype).name)
    held = kv_cache.encode(draw(*pages.shape), pages)
    T, shape = len(starts) * width, (len(starts), width)
    new = draw(T, K, H), draw(T, K, H)
    written = reference.write(held, *new, Ragged((rectangle,)), 0)
    return draw(*shape, N, H) / 8, [x.reshape(*shape, K, H) for x in new], held, written, rectangle


def _check(found, expected, rectangle, atol):
    valid_CW = np.asarray(rectangle.valid_CW)
    np.testing.assert_allclose(
        np.asarray(found)[valid_CW], np.asarray(expected)[valid_CW], atol=atol
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", _ROWS)
def test_appended_tokens_are_where_xla_writes_them_and_are_seen(rows, window, monkeypatch):
    """In blocks of a page, and in a ring that is full most of the time."""
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 1)
    q, kv, held, written, rectangle = _drawn(rows)
    append = functools.partial(tpu.append_and_attend, group=0, options=Options(window))
    found, pages = jax.jit(functools.partial(append, interpret=_INTERPRETER))(
        q, *kv, held, rectangle
    )
    assert not interpret_pallas_call.races.races_found
    np.testing.assert_array_equal(pages[1:], written[1:])
    np.testing.assert_array_equal(pages[0], held[0])  # no padding is stored
    expected = reference.attend_pages(q, written, rectangle, 0, Options(window))
    _check(found, expected, rectangle, 2e-2)
    read = functools.partial(
        tpu.attend_pages, group=0, options=Options(window), interpret=_INTERPRETER
    )
    np.testing.assert_array_equal(jax.jit(read)(q, written, rectangle), found)


def test_a_row_of_many_tokens_is_several(monkeypatch):
    """Each sees what those before it append."""
    monkeypatch.setattr(tpu, "_TILE_BYTES", 80_000)
    q, kv, held, written, rectangle = _drawn("tiles of one prompt", jnp.float32)
    found, pages = tpu.append_and_attend(q, *kv, held, rectangle, 0, interpret=_INTERPRETER)
    np.testing.assert_array_equal(pages[1:], written[1:])
    _check(found, reference.attend_pages(q, written, rectangle, 0), rectangle, 2e-5)


def test_only_rows_of_one_sequence_wait():
    """Sharing a prefix is no reason to."""
    table_BP = jnp.array([[3, 4, 0], [3, 5, 0], [3, 4, 6], [0, 0, 0]])
    column_B, count_B = jnp.array([1, 1, 2, 0]), jnp.array([2, 2, 2, 0])
    assert tpu._waits(table_BP, column_B, count_B).tolist() == [0, 0, 1, 0]


def test_rows_without_pages_are_passed_over():
    assert tpu._next(jnp.array([False, True, False, False, True])).tolist() == [1, 1, 4, 4, 4, 5]
    q, kv, held, _, rectangle = _drawn("decode")
    nobody = rectangle.replace(valid_CW=jnp.zeros_like(rectangle.valid_CW))
    found, pages = tpu.append_and_attend(q, *kv, held, nobody, 0, interpret=_INTERPRETER)
    assert not np.asarray(found).any()
    np.testing.assert_array_equal(pages, held)


# --- jax's own ------------------------------------------------------------------------------------


def _stand_in(*args, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, **options):
    """What its authors test the kernel against; no interpreter runs the kernel itself."""
    return kernel.ref_ragged_paged_attention(*args, **options)


def _interleaved(pages: jax.Array, num_kv_heads: int) -> jax.Array:
    """Token-major pages as `jax_tpu` lays them out."""
    halves = kv_cache.decode(pages).reshape(*pages.shape[:2], 2, num_kv_heads, -1)
    return halves.swapaxes(2, 3).reshape(*pages.shape[:2], 2 * num_kv_heads, -1)


@pytest.mark.parametrize(("rows", "cap"), [*((rows, None) for rows in _ROWS), ("drafts", 2.0)])
def test_jax_kernel_is_told_of_valid_tokens_only(rows, cap, monkeypatch):
    monkeypatch.setattr(kernel, "ragged_paged_attention", _stand_in)
    q, kv, held, written, rectangle = _drawn(rows, head_width=128)
    new = (x.reshape(-1, *x.shape[2:]) for x in kv)
    pages = jax_tpu.write(_interleaved(held, 2), *new, Ragged((rectangle,)), 0)
    np.testing.assert_array_equal(pages[1:], _interleaved(written, 2)[1:])
    assert pages.shape == jax_tpu.layout(len(held), _PAGE, 2, 128, "bfloat16").shape
    found = jax_tpu.attend_pages(q, pages, rectangle, 0, Options(score_cap=cap))
    assert found.dtype == jnp.float32
    expected = reference.attend_pages(q, written, rectangle, 0, Options(score_cap=cap))
    _check(found, expected, rectangle, 3e-2)  # it rounds its output, too


def test_what_jax_kernel_does_not_know_is_refused():
    case = paged_case.Case((70,), (4, 2), 64, 4, trees=True)
    q, pages, rectangle = case.arguments
    with pytest.raises(InputError, match="'jax_tpu' knows no windows, .* 'pallas_tpu' does"):
        jax_tpu.attend_pages(q, pages, rectangle, 0)
