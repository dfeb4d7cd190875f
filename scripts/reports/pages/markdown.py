"""Lines of Markdown, and the blocks of a page that such lines fill.

A page's prose is written by hand. The block NAME stands between `<!-- NAME -->` and
`<!-- end of NAME -->`. Tables, paragraphs and lists begin with an empty line.
"""

import textwrap
from collections.abc import Mapping, Sequence


def fill(text: str, blocks: Mapping[str, Sequence[str]]) -> str:
    """Replaces the lines of blocks in a page's text.

    Raises:
        ValueError: the page has no such block.
    """
    for name, lines in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, block = text.partition(begin)
        _, is_there, after = block.partition(end)
        if not is_there:
            raise ValueError(f"the page has no block of {name!r}")
        body = "\n".join(lines).strip("\n")
        text = f"{before}{begin}\n{body}\n\n{end}{after}"
    return text


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
