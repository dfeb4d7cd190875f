"""Texts in windows."""

import math

import pytest

from configs.errors import InputError
from inference.benchmark.quality import perplexity


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([], [[1, 2, 3], [4, 5, 6]]),  # nothing is predicted of a lone token
        ([9], [[9, 1, 2], [9, 3, 4], [9, 5, 6], [9, 7]]),
    ],
)
def test_windows_cover_the_text(first, expected):
    assert perplexity.windows([1, 2, 3, 4, 5, 6, 7], first, 3) == expected


def test_perplexity_of_an_even_choice():
    assert perplexity.of([-math.log(8)] * 5) == pytest.approx(8)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, -1e4])
def test_no_perplexity_of_what_is_no_number(logprob):
    with pytest.raises(InputError, match="too large"):
        perplexity.of([logprob])
