"""What `plan --advise` found, as tables for people and as JSON for tools."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from inference.planner.advise import Advice, Choice
from inference.planner.kinds.latents import Cached, Chunk
from inference.planner.kinds.mixtures import Mixture
from inference.planner.parallel.dispatch import Comparison
from scripts.reports.tables import new_table, seconds, size

_ADVICE_ROWS, _EXCLUDED_ROWS = 8, 4


def as_json(advice: Advice) -> dict[str, Any]:
    """What `json` can write."""
    return {
        "choices": [_choice(choice) for choice in advice.choices],
        "plain": advice.plain and _choice(advice.plain),
        "excluded": list(advice.excluded),
        "mixture": advice.mixture and dataclasses.asdict(advice.mixture),
        "exchange": [
            {**dataclasses.asdict(found), "saved": found.saved} for found in advice.exchange
        ],
        "caches": [dataclasses.asdict(cache) for cache in advice.caches],
        "chunks": [dataclasses.asdict(chunk) for chunk in advice.chunks],
        "expanded_from": advice.expanded_from,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    placed = choice.deployment
    return {
        "name": choice.name,
        "weights": placed.formats.weights.name,
        "cache": placed.formats.cache.name,
        "mesh": dataclasses.asdict(placed.mesh),
        "replicas": placed.replicas,
        "speculation": placed.speculation and dataclasses.asdict(placed.speculation),
        "batch": choice.batch,
        **dataclasses.asdict(choice.steady),
        "request_s": choice.request_s,
        "parts": [dataclasses.asdict(part) for part in choice.parts],
    }


def show(console: Console, advice: Advice) -> None:
    """Prints the advice."""
    _show_choices(console, advice)
    for line in _why_not(advice.excluded):
        console.print(line, markup=False, soft_wrap=True)
    if advice.mixture is not None:
        _show_mixture(console, advice.mixture)
    if advice.exchange:
        _show_exchange(console, advice.exchange)
    if advice.caches:
        _show_caches(console, advice.caches, advice.choices[0].batch)
    if advice.chunks:
        _show_chunks(console, advice.chunks, advice.expanded_from)


def _show_choices(console: Console, advice: Advice) -> None:
    found = new_table(["", "combination", "batch", "tok/s", "TTFT", "TPOT", "request", "x plain"])
    for rank, choice in enumerate(advice.choices[:_ADVICE_ROWS], 1):
        found.add_row(
            str(rank), choice.name, str(choice.batch), f"{choice.steady.output_tok_s:,.0f}",
            seconds(choice.steady.ttft_s), seconds(choice.steady.tpot_s), seconds(choice.request_s),
            f"{choice.score / advice.plain.score:.2f}" if advice.plain else "plain does not fit",
        )  # fmt: skip
    console.print(found)
    best = new_table(["in the best", "gains", "costs"])
    for part in advice.choices[0].parts:
        gain = "does not fit without" if part.gain is None else f"{part.gain:.2f} x"
        best.add_row(part.technique, gain, part.costs)
    console.print(best)


def _why_not(excluded: Sequence[str]) -> Iterable[str]:
    for reason in excluded[:_EXCLUDED_ROWS]:
        yield f"does not fit: {reason}"
    if len(excluded) > _EXCLUDED_ROWS:
        yield f"... and {len(excluded) - _EXCLUDED_ROWS} more that do not fit"


def _show_mixture(console: Console, found: Mixture) -> None:
    """Experts that a step of the best visits."""
    console.print(
        f"\nexperts: {found.top_k} of {found.num_experts} a token, "
        f"{found.active_parameters / 1e9:.4g} B of {found.parameters / 1e9:.4g} B parameters",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    rows = new_table(["batch", "experts visited", "read a chip", "of all it moves", "step"])
    for each in found.visits:
        rows.add_row(
            f"{each.batch:,}", f"{each.visited:.1f}", size(each.chip_bytes), f"{each.share:.0%}",
            seconds(each.step_s),
        )  # fmt: skip
    console.print(rows)
    until = f"for experts up to {found.bound_until:,} sequences, "
    then = f"beyond that for its {found.then}" if found.then else "which is all that fit"
    waits = f"{until}{then}" if found.bound_until else f"for its {found.then}, whatever the batch"
    console.print(f"a step waits longest {waits}", markup=False, soft_wrap=True)


def _show_exchange(console: Console, found: Sequence[Comparison]) -> None:
    """How tokens reach the experts of other chips, here and otherwise."""
    console.print(
        f"\ntokens to experts on {found[0].mesh}, all gathered or (predicted alone) each sent to "
        "the chips that it visits:",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    rows = new_table(["step", "time", "all-gather, leave a chip", "time", "all-to-all", "time",
                      "saves of the step"])  # fmt: skip
    for each in found:
        forms = (each.gathered, each.sent)
        cells = (cell for form in forms for cell in (size(form.bytes), seconds(form.seconds)))
        rows.add_row(each.name, seconds(each.step_s), *cells, f"{each.saved:.1%}")
    console.print(rows)


def _show_caches(console: Console, caches: Sequence[Cached], batch: int) -> None:
    """A latent cache beside others."""
    console.print("\ncaches with the same heads; MHA is what compares at equal quality:")
    rows = new_table(["cache", "mesh", "bytes a token, chip", "largest batch", f"step of {batch:,}",
                  "tok/s at most"])  # fmt: skip
    for each in caches:
        rows.add_row(
            each.name + ("" if each.is_run else " (predicted alone)"), str(each.mesh),
            f"{each.token_bytes:,.0f}", f"{each.largest_batch:,}", seconds(each.step_s),
            f"{each.most_tok_s:,.0f}" if each.largest_batch else "does not fit",
        )  # fmt: skip
    console.print(rows)


def _show_chunks(console: Console, chunks: Sequence[Chunk], expanded_from: int | None) -> None:
    """Prefill over latents, absorbed or not."""
    console.print(
        "\nthe end of a prompt, over latents (absorbed) or keys and values projected out of them:"
    )
    rows = new_table(["tokens a chunk", "absorbed", "projected out (predicted alone)"])
    for each in chunks:
        rows.add_row(str(each.tokens), seconds(each.absorbed_s), seconds(each.expanded_s))
    console.print(rows)
    more = (
        "no chunk takes" if expanded_from is None else f"chunks of {expanded_from} tokens on take"
    )
    console.print(f"absorbed, {more} more FLOPs of attention than projected out")
