"""Measurements that are kept in a JSON file, and the blocks of a page that show them."""

import argparse
import csv
import datetime
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inference.files import local_machine
from scripts.reports.pages import markdown

Row = dict[str, Any]  # figures of one row, as JSON has them
Rows = dict[str, Row]

# Tones of Paul Tol's muted scheme.
COLORS = ("#332288", "#88CCEE", "#44AA99", "#DDCC77")


class Results:
    """Figures by part and row, with date and machine, in a file.

    Attributes:
        parts: {part: {row: figures}}.
    """

    def __init__(self, path: Path):
        self._path = path
        self.parts = self._read()

    def _read(self) -> dict[str, Rows]:
        parts: dict[str, Rows] = {}
        return json.loads(self._path.read_text("utf-8")) if self._path.exists() else parts

    def put(self, part: str, row: str, **figures: Any) -> None:
        """Stores the figures of a row; rows that another process has stored since then remain."""
        self.parts = self._read()
        figures["at"] = f"{datetime.date.today()}, {local_machine.name()}"
        self.parts.setdefault(part, {})[row] = figures
        self._path.write_text(json.dumps(self.parts, indent=1) + "\n", "utf-8")
        print(part, row, figures, flush=True)


class Part(NamedTuple):
    """A block of a page.

    Attributes:
        measure: stores figures of some of `rows` in the results.
        show: formats the figures.
        rows: names of what is measured today, in their order.
        has_models: whether a name begins with a model's: `MODEL` or `MODEL: KIND`.
    """

    measure: Callable[[Results, Sequence[str]], None]
    show: Callable[[Rows], list[str]]
    rows: Sequence[str]
    has_models: bool = False

    def chosen(self, kinds: Sequence[str] | None, models: Sequence[str] | None) -> list[str]:
        """Returns the rows of these kinds and models; None chooses all."""
        rows = [(row.partition(": ")[0], row.rpartition(": ")[2], row) for row in self.rows]
        return [
            row
            for model, kind, row in rows
            if (kinds is None or kind in kinds)
            and (models is None or not self.has_models or model in models)
        ]


def in_order(parts: Mapping[str, Part], results: Mapping[str, Rows]) -> dict[str, Rows]:
    """Returns the measured rows that are declared today, as they are declared; no empty parts."""
    ordered = {
        name: {row: results[name][row] for row in part.rows if row in results.get(name, {})}
        for name, part in parts.items()
    }
    return {name: rows for name, rows in ordered.items() if rows}


def fill(text: str, parts: Mapping[str, Part], results: Mapping[str, Rows]) -> str:
    """Replaces the blocks of the measured parts in a page's text."""
    blocks = {}
    for name, rows in in_order(parts, results).items():
        when = "; ".join(dict.fromkeys(row["at"] for row in rows.values()))
        blocks[name] = [f"Measured {when}.", *parts[name].show(rows)]
    return markdown.fill(text, blocks)


def run(
    about: str | None,
    page: str,
    parts: Mapping[str, Part],
    draw: Callable[[dict[str, Rows], Path], None],
) -> None:
    """Measures what the command line chooses, then writes the page.

    Args:
        about: the command's documentation.
        page: path of the page; the results lie next to it.
        parts: blocks by name.
        draw: writes the pictures of all results; the path is that of the page with `.png`.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(page), help="the page")
    parser.add_argument("--parts", type=_listed, default=[*parts], help="what to measure")
    parser.add_argument("--rows", type=_listed, help="only these rows of the parts")
    parser.add_argument("--models", type=_listed, help="only these, in parts that have several")
    flags = parser.parse_args()
    require_matplotlib()
    for name in flags.parts:
        if name not in parts:
            sys.exit(f"--parts names {name!r}; valid: {', '.join(parts)}")
    chosen = {name: parts[name].chosen(flags.rows, flags.models) for name in flags.parts}
    valid = dict.fromkeys(row.rpartition(": ")[2] for name in chosen for row in parts[name].rows)
    for kind in flags.rows or ():
        if kind not in valid:
            sys.exit(f"--rows names {kind!r}; valid: {'; '.join(valid)} (quote one with a comma)")
    results = Results(flags.output.with_suffix(".json"))
    for name, rows in chosen.items():
        parts[name].measure(results, rows)
    draw(in_order(parts, results.parts), flags.output.with_suffix(".png"))
    text = fill(Path(page).read_text("utf-8"), parts, results.parts)
    flags.output.write_text(text, "utf-8")


def _listed(text: str) -> list[str]:
    """Splits 'int8,"int4 g64, GPTQ"'."""
    return next(csv.reader([text]), [])


def require_matplotlib() -> None:
    """Ends a command that cannot draw its picture."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("the page has a picture: pip install '.[plots]'")


def verdict(value: float, limit: float | None, is_least: bool = False) -> str:
    """Says what was required, and whether it is so; '' without a limit."""
    if limit is None:
        return ""
    is_met = value >= limit if is_least else value <= limit
    bound = f"≥ {limit:g}" if is_least else f"≤ {limit:.1%}"
    return f"{bound}, {'met' if is_met else 'missed'}"
