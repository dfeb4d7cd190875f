"""When two runs of greedy decoding agree."""

import math

import pytest

from scripts.reports.agreement import Answer, compare

_TOP = {7: -1.0, 8: -1.25, 9: -3.0}


def test_scores_of_the_same_tokens():
    one = Answer([7, 7], [-1.0, -1.0], [_TOP, _TOP])
    other = Answer([7, 7], [-1.0, -1.125], [_TOP, _TOP])
    assert compare([one, one], [one, other]) == (2, 0.125)


def test_after_another_token_nothing_is_compared():
    """There each prefers its own by some: the difference of scores is half of both."""
    one = Answer([7, 8, 9], [-1.0, -1.0, -1.0], [_TOP, {8: -1.0, 9: -1.25}, _TOP])
    other = Answer([7, 9, 7], [-1.0, -1.0, -9.0], [_TOP, {9: -1.0, 8: -1.5}, _TOP])
    assert compare([one], [other]) == (0, pytest.approx(0.375))


def test_a_token_that_the_other_run_does_not_think_of():
    one, other = Answer([7], [-1.0], [_TOP]), Answer([5], [-1.0], [{5: -1.0}])
    assert compare([one], [other]).worst == math.inf


def test_answers_are_of_the_same_length():
    with pytest.raises(ValueError):
        compare([Answer([7], [-1.0], [_TOP])], [Answer([7, 7], [-1.0] * 2, [_TOP] * 2)])
