"""Attention, windows, states and hybrids: what each keeps of the past, and what that is worth.

    python -m scripts.reports.architectures

measures and writes docs/architectures.md and its pictures, or --output. Figures are kept next to
the page (architectures.json) with date and machine, so that a part can be measured alone, or some
rows of it (--parts=recall --rows=S4,Mamba), and the page be written from what is there (--parts=).
A part that was never measured has no section. `language` reads what `scripts.train` has left in the
cache. `decode`, `prefill` and `snapshots` need an idle machine.
"""

from collections.abc import Mapping
from pathlib import Path

from scripts.reports.architectures import language, recall, serving
from scripts.reports.pages import results
from scripts.reports.pages.results import Part, Rows

PARTS = {
    "recall": Part(recall.measure, recall.section, recall.ROWS),
    "language": Part(language.measure, language.section, language.ROWS),
    "decode": Part(serving.decode, serving.decode_section, serving.ROWS),
    "prefill": Part(serving.prefill, serving.prefill_section, serving.ROWS),
    "snapshots": Part(serving.snapshots, serving.snapshots_section, tuple(serving.SNAPSHOT_ROWS)),
}


def text(measured: Mapping[str, Rows], picture: str) -> str:
    """Returns the page; `picture` is the first picture's name."""
    lines = [
        "# Architectures: what keeps the past, and what it is worth",
        "",
        "    python -m scripts.reports.architectures",
        "",
        "Written by that command from what it has measured; each section says when and where.",
        "[States](architecture.md) says how each mixer works, [training](training.md) what trains.",
    ]
    parts = results.in_order(PARTS, measured)
    if "recall" in parts:
        lines += ["", f"![Recall by bytes, and by keys]({picture})"]
    for name, rows in parts.items():
        lines += ["", *PARTS[name].section(rows)]
        if name == "decode":
            second = _decode_picture(Path(picture))
            lines += ["", f"![Time of a step and bytes kept, by context]({second})"]
    return "\n".join(lines) + "\n"


def _decode_picture(picture: Path) -> Path:
    return picture.with_stem(f"{picture.stem}-decode")


def _write(measured: Mapping[str, Rows], page: Path) -> None:
    picture, parts = page.with_suffix(".png"), results.in_order(PARTS, measured)
    if "recall" in parts:
        picture.write_bytes(recall.picture(parts["recall"]))
    if "decode" in parts:
        _decode_picture(picture).write_bytes(serving.picture(parts["decode"]))
    page.write_text(text(measured, picture.name), "utf-8")


if __name__ == "__main__":
    results.run(__doc__, "docs/architectures.md", PARTS, _write)
