"""The advice of `plan --advise`, as tables for people and as JSON for tools."""

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
            {**dataclasses.asdict(comparison), "saved": comparison.saved}
            for comparison in advice.exchange
        ],
        "caches": [dataclasses.asdict(cache) for cache in advice.caches],
        "chunks": [dataclasses.asdict(chunk) for chunk in advice.chunks],
        "expanded_from": advice.expanded_from,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    deployment = choice.deployment
    return {
        "name": choice.name,
        "weights": deployment.formats.weights.name,
        "cache": deployment.formats.cache.name,
        "mesh": dataclasses.asdict(deployment.mesh),
        "replicas": deployment.replicas,
        "speculation": deployment.speculation and dataclasses.asdict(deployment.speculation),
        "batch": choice.batch,
        **dataclasses.asdict(choice.steady),
        "request_s": choice.request_s,
        "parts": [dataclasses.asdict(part) for part in choice.parts],
    }


def show(console: Console, advice: Advice) -> None:
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
    table = new_table(["", "combination", "batch", "tok/s", "TTFT", "TPOT", "request", "x plain"])
    for rank, choice in enumerate(advice.choices[:_ADVICE_ROWS], 1):
        table.add_row(
            str(rank), choice.name, str(choice.batch), f"{choice.steady.output_tok_s:,.0f}",
            seconds(choice.steady.ttft_s), seconds(choice.steady.tpot_s), seconds(choice.request_s),
            f"{choice.score / advice.plain.score:.2f}" if advice.plain else "plain does not fit",
        )  # fmt: skip
    console.print(table)
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


def _show_mixture(console: Console, mixture: Mixture) -> None:
    """Experts that a step of the best visits."""
    console.print(
        f"\nexperts: {mixture.top_k} of {mixture.num_experts} a token, "
        f"{mixture.active_parameters / 1e9:.4g} B of {mixture.parameters / 1e9:.4g} B parameters",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    rows = new_table(["batch", "experts visited", "read a chip", "of all it moves", "step"])
    for point in mixture.visits:
        rows.add_row(
            f"{point.batch:,}", f"{point.visited:.1f}", size(point.chip_bytes),
            f"{point.share:.0%}", seconds(point.step_s),
        )  # fmt: skip
    console.print(rows)
    until = f"for experts up to {mixture.bound_until:,} sequences, "
    then = f"beyond that for its {mixture.then}" if mixture.then else "which is all that fit"
    waits = (
        f"{until}{then}" if mixture.bound_until else f"for its {mixture.then}, whatever the batch"
    )
    console.print(f"a step waits longest {waits}", markup=False, soft_wrap=True)


def _show_exchange(console: Console, steps: Sequence[Comparison]) -> None:
    """How tokens reach the experts of other chips, here and otherwise."""
    console.print(
        f"\ntokens to experts on {steps[0].mesh}, all gathered or (predicted alone) each sent to "
        "the chips that it visits:",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    rows = new_table(["step", "time", "all-gather, leave a chip", "time", "all-to-all", "time",
                      "saves of the step"])  # fmt: skip
    for step in steps:
        forms = (step.gathered, step.sent)
        cells = (cell for form in forms for cell in (size(form.bytes), seconds(form.seconds)))
        rows.add_row(step.name, seconds(step.step_s), *cells, f"{step.saved:.1%}")
    console.print(rows)


def _show_caches(console: Console, caches: Sequence[Cached], batch: int) -> None:
    """A latent cache beside others."""
    console.print("\ncaches with the same heads; MHA is what compares at equal quality:")
    rows = new_table(["cache", "mesh", "bytes a token, chip", "largest batch", f"step of {batch:,}",
                  "tok/s at most"])  # fmt: skip
    for cache in caches:
        rows.add_row(
            cache.name + ("" if cache.is_run else " (predicted alone)"), str(cache.mesh),
            f"{cache.token_bytes:,.0f}", f"{cache.largest_batch:,}", seconds(cache.step_s),
            f"{cache.most_tok_s:,.0f}" if cache.largest_batch else "does not fit",
        )  # fmt: skip
    console.print(rows)


def _show_chunks(console: Console, chunks: Sequence[Chunk], expanded_from: int | None) -> None:
    """Prefill over latents, absorbed or not."""
    console.print(
        "\nthe end of a prompt, over latents (absorbed) or keys and values projected out of them:"
    )
    rows = new_table(["tokens a chunk", "absorbed", "projected out (predicted alone)"])
    for chunk in chunks:
        rows.add_row(str(chunk.tokens), seconds(chunk.absorbed_s), seconds(chunk.expanded_s))
    console.print(rows)
    more = (
        "no chunk takes" if expanded_from is None else f"chunks of {expanded_from} tokens on take"
    )
    console.print(f"absorbed, {more} more FLOPs of attention than projected out")
