"""Every implementation of attention over pages against a softmax in float64, on one set of cases;
kernels in the interpreter of their back end.

The interpreter runs the Hopper kernel's copies, barriers, masks and splits as they are, starts from
NaN and (from jax 0.11) looks for races: only the two products of the tensor core are plain dots.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # no public name in 0.10
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from layers.kernels.attention import gpu, reference
from tests.layers import paged_case

_INTERPRETER = InterpretGPUParams(
    detect_races=jax.__version_info__ >= (0, 11)
)  # 0.10 overlooks them
_ATOL = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def _interpreted(*args, **options):
    return gpu.attend_pages(*args, **options, interpret=_INTERPRETER)


_IMPLEMENTATIONS = {"reference": reference.attend_pages, "pallas_gpu": _interpreted}


def _check(name, case, window=None, dtype="float32", cap=None, **options):
    program = _IMPLEMENTATIONS[name]
    attend = functools.partial(program, group=0, window=window, score_cap=cap, **options)
    found = jax.jit(attend)(*case.arguments)
    assert found.dtype == jnp.float32
    if name == "pallas_gpu" and _INTERPRETER.detect_races:
        assert not interpret_pallas_call.get_races().races_found
    expected = case.expected(window, cap)
    np.testing.assert_allclose(
        np.asarray(found)[case.valid_CW], expected[case.valid_CW], atol=_ATOL[dtype]
    )


def _lengths(page_tokens: int) -> tuple[int, ...]:
    return 0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 300


_CASES = {  # (N, K), page tokens, query tokens, head width, dtype, window
    "one query head": ((2, 2), 64, 1, 64, "float32", None),
    "many query heads": ((16, 2), 64, 1, 64, "bfloat16", None),
    "odd group": ((9, 3), 128, 1, 64, "float32", 24),
    "one KV head": ((8, 1), 64, 1, 128, "float16", None),
    "drafts": ((4, 2), 64, 4, 64, "float32", None),
    "drafts, window": ((4, 2), 128, 4, 64, "bfloat16", 100),
    "window of one": ((4, 2), 64, 1, 64, "float32", 1),
    "more tokens than a tile holds": ((32, 2), 64, 9, 64, "float32", 70),
    "wide heads": ((2, 1), 64, 1, 256, "bfloat16", None),
}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_ragged_lengths(name, case):
    heads, page_tokens, width, head_width, dtype, window = _CASES[case]
    drawn = paged_case.Case(
        _lengths(page_tokens), heads, page_tokens, width, dtype, head_width=head_width
    )
    drawn.q_CWNH *= head_width**-0.5
    _check(name, drawn, window, dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("page_tokens", [64, 128])
def test_the_whole_product(name, dtype, heads, page_tokens):
    for seed, (width, window) in enumerate(itertools.product((1, 3), (None, 1, 90))):
        drawn = paged_case.Case(
            _lengths(page_tokens), heads, page_tokens, width, dtype, seed, head_width=64
        )
        drawn.q_CWNH /= 8
        _check(name, drawn, window, dtype)


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.parametrize("window", [None, 130])
def test_splits_of_a_row_are_combined(num_splits, window):
    """Among them empty ones, and ones whose keys a draft does not see yet."""
    case = paged_case.Case((1, 65, 257, 300), (4, 2), 64, 2, head_width=64)
    case.q_CWNH /= 8
    _check("pallas_gpu", case, window, num_splits=num_splits)


@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_scores_stay_within_their_cap(name):
    case = paged_case.Case((1, 64, 200), (4, 2), 64, 1, head_width=64)
    _check(name, case, cap=1.5)


def test_large_scores_do_not_overflow():
    case = paged_case.Case((1, 64, 200), (4, 2), 64, 1, head_width=64)
    case.q_CWNH = np.float32(case.q_CWNH * 1000).astype(np.float64)
    attend = jax.jit(functools.partial(_interpreted, group=0))
    np.testing.assert_allclose(attend(*case.arguments), case.expected(None), atol=1e-3)


@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_a_visible_nan_reaches_its_readers_only(name):
    case = paged_case.Case((70, 130), (4, 2), 64, 1, head_width=64)
    page = case.table_CP[1, 1]
    pages = np.array(case.pages)
    pages[page, 3, :64] = np.nan  # a key of KV head 0
    q, _, rectangle = case.arguments
    attend = functools.partial(_IMPLEMENTATIONS[name], group=0)
    found = np.asarray(jax.jit(attend)(q, jnp.asarray(pages), rectangle))
    assert np.isnan(found[1, 0, :2]).all()
    assert np.isfinite(found[0]).all()
