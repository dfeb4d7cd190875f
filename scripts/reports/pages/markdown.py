"""Lines of Markdown; a block begins with an empty line."""

import textwrap
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return ["", *(f"| {' | '.join(cells)} |" for cells in lines)]


def prose(*sentences: str) -> list[str]:
    """Wraps a paragraph."""
    return ["", *_wrapped(" ".join(sentences))]


def bullets(*items: str) -> list[str]:
    """Wraps a list."""
    return ["", *(line for item in items for line in _wrapped(f"* {item}", "  "))]


def code(*lines: str) -> list[str]:
    """Indents formulas or commands."""
    return ["", *(f"    {line}" for line in lines)]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
