"""What the commands share that measure a page's parts, keep the figures beside it and write it."""

import datetime
import importlib.util
import json
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from inference.files import local_machine

Rows = dict[str, Any]


def check(argv: Sequence[str], parts: Sequence[str], known: Collection[str]) -> None:
    """Ends a command whose arguments name what is not there, or that cannot draw."""
    if len(argv) > 1:
        sys.exit(f"what is {argv[1]!r}? Everything is a flag")
    for part in parts:
        if part not in known:
            sys.exit(f"--parts names {part!r}; valid: {', '.join(known)}")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("the page has a picture: pip install '.[plots]'")


class Results:
    """Figures by part and row, with the date and the machine, in a file.

    Attributes:
        parts: {part: {row: figures}}.
    """

    def __init__(self, path: Path):
        self._path = path
        self.parts = self._read()

    def _read(self) -> dict[str, Rows]:
        found: dict[str, Rows] = {}
        return json.loads(self._path.read_text("utf-8")) if self._path.exists() else found

    def put(self, part: str, row: str, **found: Any) -> None:
        """Keeps a row's figures, beside those that another command has kept since."""
        self.parts = self._read()
        machine = local_machine.name()
        found["at"] = f"{datetime.date.today()}, {machine}"
        self.parts.setdefault(part, {})[row] = found
        self._path.write_text(json.dumps(self.parts, indent=1) + "\n", "utf-8")
        print(part, row, found, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, an empty one before it."""
    lines = [columns, ("---",) * len(columns), *rows]
    return ["", *(f"| {' | '.join(cells)} |" for cells in lines)]


def prose(*sentences: str) -> list[str]:
    """Lines of a paragraph, an empty one before it."""
    return ["", *textwrap.wrap(" ".join(sentences), 100, break_on_hyphens=False)]


def when(found: Rows) -> str:
    """When and where a part was measured."""
    return "; ".join(dict.fromkeys(own["at"] for own in found.values()))


def bar(value: float, required: float | None, is_least: bool = False) -> str:
    """What was required, and whether it is so."""
    if required is None:
        return ""
    is_met = value >= required if is_least else value <= required
    sign = ("≥" if is_least else "≤") + (f" {required:g}" if is_least else f" {required:.1%}")
    return f"{sign}, {'met' if is_met else 'missed'}"
