"""Hopper's kernels of attention over pages of few bits, and over what queries choose, compiled and
not interpreted, against float64.
"""

import pytest

from layers.kernels.attention import hopper_pages
from tests.device.hopper import hopper  # noqa: F401
from tests.layers.kernels.test_quantized_cache import HOPPER_CASES, check_on_hopper
from tests.layers.kernels.test_sparse_gpu import (
    BOUNDS,
    CHOSEN,
    SCORES,
    STRETCHES,
    check_bounds,
    check_chosen,
    check_scores,
    check_stretches,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("sizes", [{}, {"num_splits": 2}], ids=["own sizes", "two splits"])
@pytest.mark.parametrize("name", hopper_pages.FORMATS)
@pytest.mark.parametrize("case", HOPPER_CASES)
def test_pages_of_few_bits(case, name, sizes):
    for seed, lengths in enumerate([(0, 65, 172), (1, 300, 128)]):
        check_on_hopper(name, case, lengths, seed, None, **sizes)


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_an_indexer(name):
    check_scores(SCORES[name], (0, 1, 64, 300, 384), 0, None)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_pages(name):
    check_bounds(BOUNDS[name], (0, 1, 150, 64), 0, None)


@pytest.mark.parametrize("name", CHOSEN)
def test_attention_to_what_queries_choose(name):
    """Copies of scattered entries lie in shared memory as the tensor core reads them."""
    for seed, lengths in enumerate([(0, 1, 70, 400), (512, 3, 65, 130)]):
        check_chosen(CHOSEN[name], lengths, seed, None)


@pytest.mark.parametrize("name", STRETCHES)
def test_attention_to_tokens_and_entries(name):
    for seed, lengths in enumerate([(0, 3, 250), (256, 101, 64)]):
        check_stretches(STRETCHES[name], lengths, seed, None)
