"""What answers say in the end."""

import pytest

from inference.text.ballots import ballot


@pytest.mark.parametrize("answer, expected", [
    ("So 12 of 18.\nThe answer is 1,018.", "1018"),
    ("It costs $3.50", "3.5"),
    ("-7.00 degrees", "-7"),
    ("From 3 to \\boxed{\\frac{1}{2}}, not 4", "\\frac{1}{2}"),
    ("\\boxed{a} and \\boxed{ b c }", "bc"),
    ("\\boxed{cut off 5", "5"),
    ("It is\n\n  Paris.\n", "paris"),
    ("<think>1999, then 2000</think>\nParis", "paris"),
    ("[THINK]3[/THINK]4", "4"),
    ("", ""),
    (" \n ", ""),
])  # fmt: skip
def test_the_end_of_an_answer(answer, expected):
    assert ballot(answer) == expected
