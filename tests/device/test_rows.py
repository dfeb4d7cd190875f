"""Hopper's kernels of rows between products, compiled and not interpreted, against float64."""

import pytest

from tests.device.hopper import hopper  # noqa: F401
from tests.layers.kernels import test_append, test_norm_of_sum
from tests.layers.kernels.test_recurrence import CONVOLUTIONS, check_convolution

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("T", [1, 3, 64])
@pytest.mark.parametrize("case", test_append.CASES, ids=str)
def test_queries_and_new_rows_of_pages(case, T):
    test_append.check(T, *case, interpret=None)


@pytest.mark.parametrize("case", test_norm_of_sum.CASES, ids=str)
def test_norms_of_sums(case):
    """And of as many rows, so wide, as models have."""
    T, D, *options = case
    for rows, width in ((T, D), (64, D), (1, 4096), (64, 7168)):
        test_norm_of_sum.check(rows, width, *options, interpret=None)


@pytest.mark.parametrize("num_drafts, counts", [(0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case, num_drafts, counts):
    check_convolution(counts, num_drafts, *case, 0, interpret=None)
