"""Which pages of a prompt a budget keeps, by hand."""

import numpy as np
import pytest

from configs.errors import InputError
from inference.kv_pages import prompt_pages


@pytest.mark.parametrize(
    "num_tokens, budget, excess",
    [
        (100, None, 0), (100, 100, 0), (100, 1000, 0),
        (100, 99, 8),  # the last page has 4 tokens, and counts whole
        (100, 72, 32), (100, 79, 32), (100, 80, 24),
        (104, 72, 32), (105, 72, 40),
    ],
)  # fmt: skip
def test_what_a_budget_has_no_room_for_is_whole_pages(num_tokens, budget, excess):
    assert prompt_pages.num_excess_tokens(num_tokens, budget, 8) == excess
    assert budget is None or num_tokens - excess <= max(budget, num_tokens * (excess == 0))


@pytest.mark.parametrize("page_tokens, least", [(1, 34), (8, 48), (16, 64), (64, 192)])
def test_what_must_stay_has_room_or_the_budget_is_refused(page_tokens, least):
    """Of 201 tokens the first, those at 168 to 199, which choose, and the last."""
    excess = prompt_pages.num_excess_tokens(201, least, page_tokens)
    assert excess == (-(-201 // page_tokens) - least // page_tokens) * page_tokens
    with pytest.raises(InputError, match=f"of 201 tokens is at least {least}, not {least - 1}: "):
        prompt_pages.num_excess_tokens(201, least - 1, page_tokens)


def test_a_prompt_that_chooses_whole_has_nothing_to_give():
    with pytest.raises(InputError, match=r"of 30 tokens is at least 30, not 29"):
        prompt_pages.num_excess_tokens(30, 29, 8)


def test_pages_of_the_least_weight_go():
    """12 pages of 8 tokens and one of the last token: 0 and 8 to 12 stay whatever they weigh."""
    weight_S = np.zeros(128, np.float32)
    weight_S[3:96:8] = 0, 5, 1, 4, 2, 7, 3, 6, 0, 0, 0, 0
    weight_S[96:] = 1e6  # of nothing
    for num_dropped, expected in enumerate([[], [2], [2, 4], [2, 4, 6], [2, 3, 4, 6]]):
        assert prompt_pages.choose(weight_S, 97, 8 * num_dropped, 8) == expected
    assert prompt_pages.choose(weight_S, 97, 56, 8) == [1, 2, 3, 4, 5, 6, 7]


def test_of_equal_pages_the_later_go():
    assert prompt_pages.choose(np.ones(96, np.float32), 97, 24, 8) == [5, 6, 7]


def test_what_stands_behind_the_prompt_is_no_page():
    weight_S = np.append(np.ones(95, np.float32), np.zeros(33, np.float32))
    assert prompt_pages.choose(weight_S, 96, 24, 8) == [4, 5, 6]


def test_a_token_speaks_for_its_neighbours():
    """Its weight is that of seven tokens: at the edge of a page the next one has a share."""
    weight_S = np.zeros(96, np.float32)
    weight_S[[23, 44]] = 1.0, 0.9  # the end of page 2, the middle of page 5
    assert prompt_pages.choose(weight_S, 97, 24, 8) == [4, 6, 7]
    assert prompt_pages.choose(weight_S, 97, 32, 8) == [1, 4, 6, 7]
    assert prompt_pages.choose(weight_S, 97, 40, 8) == [1, 3, 4, 6, 7]
    assert prompt_pages.choose(weight_S, 97, 48, 8) == [1, 2, 3, 4, 6, 7]
