"""Figures of the notes beside ours: what agrees, and how the page is written."""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

AGREES, DIFFERS = "✓", "✗"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One figure.

    Attributes:
        what: the figure, with its unit.
        notes: letters of the notes that give it.
        says: as they write it.
        ours: computes it, in the same unit; its source is printed.
        why: where the figures differ, in a few words.
    """

    what: str
    notes: str
    says: str
    ours: Callable[[], float]
    why: str = ""


class Score:
    """Counts comparisons over the whole page."""

    def __init__(self) -> None:
        self.agree = self.differ = 0

    def mark(self, says: str, ours: float) -> str:
        """AGREES or DIFFERS, counted."""
        if agrees(says, ours):
            self.agree += 1
            return AGREES
        self.differ += 1
        return DIFFERS


def agrees(says: str, ours: float) -> bool:
    """Whether `ours` rounds to the digits that are written; zeros at the end of a whole number are
    none.
    """
    found = re.search(r"\d[\d,]*(?:\.(\d+))?", says)
    assert found is not None, says
    digits = found[0].replace(",", "")
    unit = 10.0 ** -len(found[1] or "")
    if not found[1]:
        unit = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(ours - float(digits)) <= unit / 2 * (1 + 1e-9)


def shown(value: float) -> str:
    """Whole numbers in full, others with four digits or more."""
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    size = abs(value)
    digits = 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    return f"{value:,.{digits}f}"


def source(function: Callable[[], float]) -> str:
    """The expression of a lambda, of which a line holds at most one."""
    path, line = inspect.getsourcefile(function), function.__code__.co_firstlineno
    assert path is not None
    text, lambdas = _lambdas(path)
    segment = ast.get_source_segment(text, lambdas[line].body)
    assert segment is not None
    return re.sub(r"\s+", " ", segment)


@functools.cache
def _lambdas(path: str) -> tuple[str, dict[int, ast.Lambda]]:
    text = Path(path).read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    lambdas = {node.lineno: node for node in found}
    assert len(lambdas) == len(found), f"{path}: two lambdas on one line"
    return text, lambdas


def prose(*parts: str) -> list[str]:
    """A paragraph."""
    return [*_wrapped(" ".join(parts)), ""]


def bullets(*items: str) -> list[str]:
    """A list."""
    return [line for item in items for line in _wrapped(f"* {item}", indent="  ")] + [""]


def code(*lines: str) -> list[str]:
    """Formulas or a command."""
    return [*(f"    {line}" for line in lines), ""]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 98, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:], ""]


def compared(section: int, claims: Sequence[Claim], score: Score) -> list[str]:
    """A table of claims, and the expressions that gave ours."""
    rows, expressions = [], []
    for number, claim in enumerate(claims, 1):
        value = claim.ours()
        mark = score.mark(claim.says, value)
        assert (mark == DIFFERS) == bool(claim.why), f"{claim.what}: {claim.says}, {value}"
        verdict = f"{mark} {claim.why}".strip()
        given = (claim.what, claim.notes, claim.says, shown(value), verdict)
        rows.append((f"{section}.{number}", *given))
        expressions.append(f"{source(claim.ours)}  # {section}.{number}")
    return [
        *table(("", "figure", "note", "says", "ours", ""), rows),
        *("<details><summary>Ours, as computed</summary>", "", "```python"),
        *expressions,
        *("```", "</details>", ""),
    ]
