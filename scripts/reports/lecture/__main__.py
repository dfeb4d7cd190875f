"""Writes docs/lecture.md: the figures of five sets of notes on one lecture next to the planner's.

python -m scripts.reports.lecture [FILE]
"""

import sys
from pathlib import Path

from scripts.reports.lecture import arithmetic, caches, decoding, errata, throughput
from scripts.reports.lecture.claims import AGREES, DIFFERS, Score
from scripts.reports.pages.markdown import code, prose, table

ROOT = Path(__file__).resolve().parents[3]


def page() -> str:
    """Returns the whole page."""
    score = Score()
    sections = [
        *(arithmetic.intensity(score), arithmetic.phases(score), throughput.cache(score)),
        *(throughput.latency(score), caches.smaller(score), caches.states(), caches.bits(score)),
        *(decoding.drafts(score), decoding.batches(score), decoding.question()),
        *(errata.slips(), errata.claims()),
    ]
    lines = _introduction(score) + [line for section in sections for line in ("", *section)]
    return "\n".join(lines) + "\n"


NOTES = (
    ("**A**", "*Lecture 10: Inference*, enhanced summary by Hatem Mohamed (2025)"),
    ("**B**", "summary of the recording by Stanford Online (2026)"),
    ("**C**", "*Inference: Speed, Memory & Tricks*, an interactive lesson in ten chapters"),
    ("**D**", "CS336 notes, lecture 10, by Qihong Ruan (2025)"),
    ("**E**", "course notes that file the lecture under CS 153, *Frontier Systems*"),
)


def _introduction(score: Score) -> list[str]:
    return [
        "# The lecture, reproduced",
        *prose(
            "Lecture 10 of Stanford's CS336, *Language Modeling from Scratch*, derives what",
            "inference costs from bytes and FLOPs. This page takes five sets of notes on it,",
            "computes every table and worked figure in them with Ridgeline's planner, and says",
            'where they err. What stands under "ours" is computed when the page is written:',
        ),
        *code("python -m scripts.reports.lecture"),
        *table(("", "notes"), NOTES),
        *prose(
            f"{AGREES} means that ours rounds to the digits the note gives (zeros at the end of a",
            f"whole number are none), {DIFFERS} that it does not. Of {score.agree + score.differ}",
            f"figures compared, {score.agree} agree and {score.differ} differ. [Errata](#errata)",
            "lists the slips, those in words too. The lecture's own program, `lecture_10.py`, is",
            "right wherever it computes; what its text gets wrong is marked L there.",
        ),
        *prose(
            "Letters: T query tokens, B sequences, S key positions, D model width, F feed-forward",
            "width, N query heads, K key/value heads, G = N/K, H head width, L layers, C and R",
            "latent rank and rope width, M state width, k drafts, a their acceptance, c the time",
            "of one in steps of the target. GB are 1e9 bytes. `lecture` accounting reads all",
            "weights and the whole cache once a step and takes that for its time; `exact` counts",
            "every byte and FLOP. The expressions are Python; to try them:",
        ),
        *code("python -i -m scripts.reports.lecture.names"),
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "lecture.md"
    target.write_text(page(), encoding="utf-8")
