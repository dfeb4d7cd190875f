"""Smaller shapes of a model that `plan` names, as tables for people."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from inference.planner import acceptance
from scripts.reports.tables import new_table, seconds, size, yes

if TYPE_CHECKING:  # brings numpy, without which plans start
    from inference.prune.advice import Draft, ShapeAdvice


def show_advice(console: Console, advice: "ShapeAdvice") -> None:
    """Prints options for a budget, which of them is cheaper to make, and the command."""
    table = new_table(
        ["model", "weights", "shape", "parameters", "bytes", "step", "tok/s", "meets"]
    )
    for option in advice.options:
        table.add_row(
            option.name, option.weights, _named(option.widths), f"{option.parameters / 1e6:,.1f} M",
            size(option.weight_bytes), seconds(option.step_s), f"{1 / option.step_s:,.1f}",
            yes(option.meets),
        )  # fmt: skip
    console.print(table)
    verdict = (
        "the parent in fewer bits is as small or as fast without training: quantize first "
        "(scripts.quantize)"
        if advice.is_quantizing_enough
        else "no format of the parent meets it: prune, then train what is left"
    )
    for line in (f"{advice.budget}: {verdict}", advice.command):
        console.print(line, markup=False, soft_wrap=True)


def show_drafts(console: Console, drafts: "Sequence[Draft]") -> None:
    """Prints the speed of a model with children of several sizes as drafts; a star: the fastest."""
    most = f"{acceptance.SIZES[-1]:.0%}"
    console.print(
        "\nchildren as drafts, at the acceptance of published models of their size (of those above "
        f"{most}: of {most}):"
    )
    table = new_table(["", "of the model", "shape", "step", "acceptance", "drafts", "tok/s",
                       "ratio to no drafts"])  # fmt: skip
    best = max(drafts, key=lambda draft: draft.drafted.tok_s)
    for draft in drafts:
        drafted, proposed = draft.drafted, draft.drafted.speculation
        table.add_row(
            "*" if draft is best else "", f"{proposed.size:.0%}", _named(draft.widths),
            seconds(drafted.draft_s), f"{proposed.acceptance:.2f}", str(proposed.drafts),
            f"{drafted.tok_s:,.1f}", f"{drafted.speedup:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(best.command, markup=False, soft_wrap=True)


def _named(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in widths.items())
