"""Figures of the notes next to ours: which agree, and the tables that show them."""

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.reports.pages.markdown import table

AGREES, DIFFERS = "✓", "✗"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One figure.

    Attributes:
        what: the figure, with its unit.
        notes: letters of the notes that give it.
        says: as they write it.
        compute: returns our figure in the same unit; its source is printed.
        why: where the figures differ, in a few words.
    """

    what: str
    notes: str
    says: str
    compute: Callable[[], float]
    why: str = ""


class Score:
    """Counts comparisons over the whole page."""

    def __init__(self) -> None:
        self.agree = self.differ = 0

    def mark(self, says: str, value: float) -> str:
        """Returns AGREES or DIFFERS, and counts it."""
        if agrees(says, value):
            self.agree += 1
            return AGREES
        self.differ += 1
        return DIFFERS


def agrees(says: str, value: float) -> bool:
    """Returns whether `value` rounds to the written digits; zeros at the end of a whole number are
    no digits.
    """
    number = re.search(r"\d[\d,]*(?:\.(\d+))?", says)
    assert number is not None, says
    digits = number[0].replace(",", "")
    unit = 10.0 ** -len(number[1] or "")
    if not number[1]:
        unit = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(value - float(digits)) <= unit / 2 * (1 + 1e-9)


def shown(value: float) -> str:
    """Writes whole numbers in full, others with four digits or more."""
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    size = abs(value)
    digits = 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    return f"{value:,.{digits}f}"


def source(function: Callable[[], float]) -> str:
    """Returns the expression of a lambda, the only one on its line."""
    path, line = inspect.getsourcefile(function), function.__code__.co_firstlineno
    assert path is not None
    text, lambdas = _lambdas(path)
    segment = ast.get_source_segment(text, lambdas[line].body)
    assert segment is not None
    return re.sub(r"\s+", " ", segment)


@functools.cache
def _lambdas(path: str) -> tuple[str, dict[int, ast.Lambda]]:
    text = Path(path).read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    lambdas = {node.lineno: node for node in nodes}
    assert len(lambdas) == len(nodes), f"{path}: two lambdas on one line"
    return text, lambdas


def compared(section: int, claims: Sequence[Claim], score: Score) -> list[str]:
    """Formats a table of claims, and the expressions of our figures."""
    rows, expressions = [], []
    for number, claim in enumerate(claims, 1):
        value = claim.compute()
        mark = score.mark(claim.says, value)
        assert (mark == DIFFERS) == bool(claim.why), f"{claim.what}: {claim.says}, {value}"
        cells = (claim.what, claim.notes, claim.says, shown(value), f"{mark} {claim.why}".strip())
        rows.append((f"{section}.{number}", *cells))
        expressions.append(f"{source(claim.compute)}  # {section}.{number}")
    return [
        *table(("", "figure", "note", "says", "ours", ""), rows),
        *("", "<details><summary>Ours, as computed</summary>", "", "```python"),
        *expressions,
        *("```", "</details>"),
    ]
