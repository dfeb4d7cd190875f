"""What keeps the past, and what it is worth: attention, windows, states, and their hybrids.

    python -m scripts.reports.architectures

measures and writes docs/architectures.md and its picture, or --output. Each figure is kept beside
the page (architectures.json) with its date and machine, so that a part can be measured alone, or
some rows of it (--parts=recall --rows=S4,Mamba), and the page be written anew from what is there
(--parts=). What was never measured has no section. `language` reads what `scripts.train` has left
in the cache. `decode`, `prefill` and `snapshots` need an idle machine.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from scripts.reports.architectures import language, recall, serving
from scripts.reports.pages.results import Results, Rows, check


class Part(NamedTuple):
    """A section of the page.

    Attributes:
        measure: (results, some of `rows`) puts figures where they are kept.
        section: its lines, of figures by row.
        rows: that are measured today, in their order.
    """

    measure: Callable[[Results, tuple[str, ...]], None]
    section: Callable[[Rows], list[str]]
    rows: tuple[str, ...]


_PARTS = {
    "recall": Part(recall.measure, recall.section, recall.ROWS),
    "language": Part(language.measure, language.section, language.ROWS),
    "decode": Part(serving.decode, serving.of_decode, serving.ROWS),
    "prefill": Part(serving.prefill, serving.of_prefill, serving.ROWS),
    "snapshots": Part(serving.snapshots, serving.of_snapshots, tuple(serving.KEPT)),
}
_OUTPUT = flags.DEFINE_string("output", "docs/architectures.md", "the page")
_ASKED = flags.DEFINE_list("parts", list(_PARTS), "what to measure")
_ROWS = flags.DEFINE_list("rows", None, "only these rows of the parts")


def in_order(parts: dict[str, Rows]) -> dict[str, Rows]:
    """What was measured of the rows of today, as they are declared."""
    found = {
        name: {row: parts[name][row] for row in part.rows if row in parts.get(name, {})}
        for name, part in _PARTS.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def text(parts: dict[str, Rows], picture: str) -> str:
    """The page of what was measured."""
    lines = [
        "# Architectures: what keeps the past, and what it is worth",
        "",
        "    python -m scripts.reports.architectures",
        "",
        "Written by that command from what it has measured; each section says when and where.",
        "[States](architecture.md) says how each mixer works, [training](training.md) what trains.",
    ]
    parts = in_order(parts)
    if "recall" in parts:
        lines += ["", f"![Recall by bytes, and by keys]({picture})"]
    for name, found in parts.items():
        lines += ["", *_PARTS[name].section(found)]
        if name == "decode":
            lines += ["", f"![Time of a step and bytes kept, by context]({_of_serving(picture)})"]
    return "\n".join(lines) + "\n"


def _of_serving(picture: str) -> str:
    """The name of the second picture."""
    return str(Path(picture).with_stem(f"{Path(picture).stem}-decode"))


def main(argv: list[str]) -> None:
    """Measures, and writes the page."""
    check(argv, _ASKED.value, _PARTS)
    page = Path(_OUTPUT.value)
    picture = page.with_suffix(".png")
    results = Results(page.with_suffix(".json"))
    known = list(dict.fromkeys(row for name in _ASKED.value for row in _PARTS[name].rows))
    rows = known if _ROWS.value is None else _ROWS.value
    for row in rows:
        if row not in known:
            sys.exit(f"--rows names {row!r}; valid: {'; '.join(known)} (quote one with a comma)")
    for name in _ASKED.value:
        own = tuple(row for row in _PARTS[name].rows if row in rows)
        _PARTS[name].measure(results, own)
    found = in_order(results.parts)
    if "recall" in found:
        picture.write_bytes(recall.picture(found["recall"]))
    if "decode" in found:
        second = picture.with_name(_of_serving(picture.name))
        second.write_bytes(serving.picture(found["decode"]))
    page.write_text(text(results.parts, picture.name), "utf-8")


if __name__ == "__main__":
    app.run(main)
