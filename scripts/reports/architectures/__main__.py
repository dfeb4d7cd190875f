"""Attention, windows, states and hybrids: what each keeps of the past, and what that is worth.

    python -m scripts.reports.architectures

measures, and writes the tables of docs/architectures.md and its pictures, or --output. Figures are
kept next to the page (architectures.json) with date and machine, so that a part can be measured
alone, or some rows of it (--parts=recall --rows=S4,Mamba), and the tables be written from what is
there (--parts=). `decode`, `prefill` and `snapshots` need an idle machine.
"""

from collections.abc import Mapping
from pathlib import Path

from scripts.reports.architectures import recall, serving
from scripts.reports.pages import results
from scripts.reports.pages.results import Part, Rows

PARTS = {
    "recall": Part(recall.measure, recall.tables, recall.ROWS),
    "decode": Part(serving.decode, serving.decode_tables, serving.ROWS),
    "prefill": Part(serving.prefill, serving.prefill_table, serving.ROWS),
    "snapshots": Part(serving.snapshots, serving.snapshots_table, tuple(serving.SNAPSHOT_ROWS)),
}


def _draw(parts: Mapping[str, Rows], path: Path) -> None:
    if "recall" in parts:
        path.write_bytes(recall.picture(parts["recall"]))
    if "decode" in parts:
        decode = path.with_stem(f"{path.stem}-decode")
        decode.write_bytes(serving.picture(parts["decode"]))


if __name__ == "__main__":
    results.run(__doc__, "docs/architectures.md", PARTS, _draw)
