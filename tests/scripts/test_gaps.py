"""The report on filled gaps: its cases, and its test of chance."""

import pytest

from scripts.reports.gaps import cases

LINES = [f"    name_{n} = function_{n}(name_{n - 1}, {n})\n" for n in range(60)]


def test_cases_are_names_in_the_documents():
    document = "".join([*LINES[:30], "# nothing to fill in\n" * 20, *LINES[30:]])
    assert cases.chosen([document], 25, 3, 2, seed=1) == cases.chosen([document], 25, 3, 2, seed=1)
    recurring, of_any = cases.chosen([document], 25, 3, 2, seed=1)
    assert len(of_any) == 25 and 3 < len(recurring) <= 25
    for case in of_any + recurring:
        assert case.prefix + case.middle + case.suffix in document
        assert "#" not in case.middle and not case.prefix[-1].isalnum()
        assert case.prefix.count("\n") == 3 and case.suffix.count("\n") == 3
        name = case.middle.strip()
        assert case.recurs == (name in case.suffix and name not in case.prefix)
    assert all(case.recurs for case in recurring)


@pytest.mark.parametrize("only_first, only_second, chance", [
    (0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (0, 6, 2 / 64), (1, 9, 22 / 1024),
])  # fmt: skip
def test_how_likely_a_difference_is_by_chance(only_first, only_second, chance):
    first = [True] * only_first + [False] * only_second + [True, False]
    second = [False] * only_first + [True] * only_second + [True, False]
    assert cases.mcnemar(first, second) == (only_first, only_second, pytest.approx(chance))
