"""What each way to shrink the cache gains, and what it costs.

    python -m scripts.reports.caches

measures and writes docs/caches.md and its picture, or --output. Each figure is kept beside the page
(caches.json) with its date and machine, so that a part can be measured alone, or some rows of it
(--parts=quality --rows=int8,fp8), and the page be written anew from what is there (--parts=). What
was never measured has no section. Only `time` needs an idle machine.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from inference.benchmark import steps
from scripts.reports.caches import kinds, measured
from scripts.reports.pages.results import Results, Rows, bar, check, prose, table, when
from scripts.reports.plots import figures

_MEASURE: dict[str, Callable[..., None]] = {
    "bytes": measured.bytes_held,
    "quality": measured.quality,
    "needle": measured.needles,
    "time": measured.seconds,
    "batch": measured.batch,
    "overload": measured.overload,
}
_OUTPUT = flags.DEFINE_string("output", "docs/caches.md", "the page")
_PARTS = flags.DEFINE_list("parts", list(_MEASURE), "what to measure")
_ROWS = flags.DEFINE_list("rows", None, "only these rows of the parts")
_MODELS = flags.DEFINE_list("models", list(measured.MODELS), "of the part `quality`")

# By how much of its share a row may be worse than the plain cache's, as was required.
_MOST_WORSE = {kinds.INT8: 0.002, "fp8": 0.01, kinds.QUEST: 0.03}
_LEAST_FOUND = {kinds.QUEST: 0.9}
_LEAST_AT_ONCE = {kinds.INT8: 1.9}

_COLORS = ("#332288", "#88CCEE", "#44AA99", "#DDCC77")  # of Paul Tol's muted scheme


def _of_bytes(found: Rows, published: Rows) -> list[str]:
    for name, own in (found | published).items():
        for each in ("", "pool_"):
            predicted, allocated = own[f"{each}predicted"], own[f"{each}allocated"]
            if predicted != allocated:
                sys.exit(f"{name}: {predicted} bytes are predicted, {allocated} allocated")
    context = measured.CONTEXTS[0]

    def bytes_of(found: Rows, base: str) -> list[str]:
        rows = [
            (
                name, f"{own['predicted']:,.0f}", f"{own['allocated']:,.0f}",
                f"{own['pool_predicted']:,}", f"{own['pool_allocated']:,}",
                f"{own['held'] / 2**20:,.1f}", f"{found[base]['held'] / own['held']:.2f}",
            )
            for name, own in found.items()
        ]  # fmt: skip
        columns = (
            "cache", "a token, predicted", "allocated", "pages, predicted", "allocated",
            f"of {context:,} tokens, MiB", "times smaller",
        )  # fmt: skip
        return table(columns, rows)

    return [
        "## Bytes",
        *prose(
            f"{kinds.REFERENCE.name}'s widths (30 layers, 9 heads of 64), {when(found)}. GQA has",
            "3 KV heads, and so have all others but MHA, MQA, MLA, DSA and V4; a latent vector has",
            "four heads' elements, its rotary key half of one's. Bytes are predicted by the",
            "planner and counted in the arrays of an engine with room for one sequence of",
            f"{measured.LENGTH:,} tokens and the page that padding is written to. A window keeps",
            "less the longer a sequence is; Quest and DSA keep all, and read less. V4 keeps an",
            "entry as wide as a latent vector for every 4 or 128 tokens, and of a window of 128",
            "each token's own vector and what entries are pooled from, most of its bytes a token.",
        ),
        *bytes_of(found, kinds.MHA),
        *prose(
            "Character.AI's stack (one KV head, windows of 1,024 in five layers of six, each cache",
            "read by two layers; 36 layers of Llama 2 13B's width) beside the same layers with a",
            f"KV head for each query head and no windows, {when(published)}; the arrays are for",
            "one sequence of 256 tokens:",
        ),
        *bytes_of(published, list(published)[-1]),
    ]


def _of_quality(found: Rows) -> list[str]:
    rows = []
    for name, own in found.items():
        model, _, kind = name.partition(": ")
        plain = found[f"{model}: {kinds.PLAIN}"]
        worse = own["perplexity"] / plain["perplexity"] - 1
        rows.append((
            model, kind, f"{own['perplexity']:.4f}", f"{worse:+.2%}", f"{own['agreement']:.2%}",
            bar(worse, _MOST_WORSE.get(kind)),
        ))  # fmt: skip
    columns = ("model", "cache", "perplexity", "change", "same likeliest token", "required")
    tokens = next(iter(found.values()))["tokens"]
    return [
        "## Quality",
        *prose(
            f"{tokens:,} tokens of Python's help topics, scored in pieces of {measured.LENGTH:,},",
            f"weights and activations in bfloat16, {when(found)}. Quest reads {kinds.BUDGET}",
            "tokens in pages of 16, a quarter of a whole piece; every query does, those of prompts",
            f"too. Gemma's own windows of {kinds.WINDOW} stay, so Quest and windows of the others",
            "change three layers of its 18.",
        ),
        *table(columns, rows),
    ]


def _of_needles(found: Rows) -> list[str]:
    plain = sum(found[kinds.PLAIN]["found"])
    rows = []
    for name, own in found.items():
        hits = own["found"]
        share = sum(hits) / plain
        rows.append((
            name, f"{sum(hits)} of {len(hits)}", "".join(".●"[hit] for hit in hits),
            f"{share:.2f}", bar(share, _LEAST_FOUND.get(name), is_least=True),
        ))  # fmt: skip
    columns = ("cache", "found", "where, from first to last", "beside bfloat16", "required")
    return [
        "## A needle in a text",
        *prose(
            f"Somewhere in {measured.NEEDLE_TOKENS:,} tokens of the help topics stands a line as",
            "`The magic number of Fennmoor is 48213.`; they end with `The magic number of Fennmoor",
            f"is`, which {kinds.REFERENCE.name} continues greedily. It has found the number if it",
            f"tells it within eight tokens. The same {measured.NEEDLES} times, with another",
            "name and number, from the beginning of the text to its end;",
            f"{when(found)}.",
        ),
        *table(columns, rows),
    ]


def _of_seconds(found: Rows) -> list[str]:
    rows = []
    for name, own in found.items():
        base = found[own["beside"]]
        for context in own["measured_s"]:
            here, there = own["measured_s"][context], base["measured_s"][context]
            said, said_there = own["predicted_s"][context], base["predicted_s"][context]
            rows.append((
                name, f"{int(context):,}", f"{said * 1e3:.1f}", f"{here * 1e3:.1f}",
                f"{said / here:.2f}", own["beside"], f"{said / said_there:.2f}",
                f"{here / there:.2f}",
            ))  # fmt: skip
    columns = (
        "cache", "context", "predicted, ms", "measured, ms", "predicted / measured", "beside",
        "predicted", "measured",
    )  # fmt: skip
    return [
        "## A step's time",
        *prose(
            f"{measured.ROWS} requests decode, {kinds.REFERENCE.name}'s widths, random weights in",
            f"bfloat16, medians of {measured.REPEATS} runs of {steps.IN_A_ROW} steps,",
            f"{when(found)}. The planner's constants come from steps of the plain model, those of",
            f"the others calibrate nothing. Quest reads {kinds.LONG_BUDGET:,} tokens,",
            f"DSA {kinds.TOP_K}.",
        ),
        *table(columns, rows),
        *prose(
            "One constant stands for what attention reaches, in prefill and decoding alike, found",
            "at no more than 1,024 tokens: so plain decoding over many is predicted too slow, and",
            "what is compared with it seems to gain more than it does. int8 computes as many",
            "products as bfloat16. An indexer scores every token, or entry. V4's mixers run as",
            "small operations of XLA, whose time depends on nothing that is read: with a stride of",
            "128 as much at 256 tokens as at 16,384 (`docs/log.md`).",
        ),
    ]


def _of_batches(found: Rows) -> list[str]:
    models, names = (list(dict.fromkeys(name.split(": ")[at] for name in found)) for at in (0, 1))
    lengths = [(model, f"{length}") for model in models for length in measured.LENGTHS]
    rows = []
    for kind in names:
        each = (found[f"{model}: {kind}"]["sequences"][length] for model, length in lengths)
        rows.append((kind, *(f"{count:,}" for count in each)))
    columns = ("cache", *(f"{model}, {int(length):,}" for model, length in lengths))
    return [
        "## The largest batch in 80 GB",
        *prose(
            "Sequences of so many tokens that fit beside the weights, as the planner says",
            f"({when(found)}): Llama 2 13B in bfloat16, 70B with weights of four bits, since in",
            "bfloat16 they take 138 GB. GQA has 8 KV heads, with which 70B was published; 13B was",
            "with MHA.",
        ),
        *table(columns, rows),
    ]


def _of_overload(found: Rows) -> list[str]:
    plain, rows = found[kinds.PLAIN], []
    counts = {"running_p50": "median", "running_mean": "mean", "running_peak": "most"}
    for name, own in found.items():
        times = {each: own[each] / plain[each] for each in counts}
        cells = [(f"{own[each]:.4g}", f"{times[each]:.2f}") for each in counts]
        rows.append((
            name, *itertools.chain(*cells), f"{own['preemptions']:.0f}",
            bar(times["running_mean"], _LEAST_AT_ONCE.get(name), is_least=True),
        ))  # fmt: skip
    pairs = ((each, "times") for each in counts.values())
    columns = ("cache", *itertools.chain(*pairs), "preemptions", "required of the mean")
    load = measured.LOAD
    return [
        "## Requests at once in equal memory",
        *prose(
            f"{load.num_requests} requests come together, with prompts and answers of",
            f"{load.prompt.low} to {load.prompt.most} tokens each, to an engine with",
            f"{measured.CACHE_BYTES >> 20} MiB of pages for a model that caches what",
            f"{kinds.REFERENCE.name} does. How many it ran at once: the median of its steps,",
            f"the mean over time, and the most. {when(found)}.",
        ),
        *table(columns, rows),
    ]


def _picture(parts: dict[str, Rows]) -> bytes:
    def draw(left: Any, right: Any) -> None:
        _draw_quality(left, parts["quality"])
        if "time" in parts:
            _draw_seconds(right, parts["time"])
        else:
            right.set_axis_off()

    return figures.png("What less cache costs, and what it gains", draw)


def _draw_quality(axes: Any, found: Rows) -> None:
    models, names = (list(dict.fromkeys(name.split(": ")[at] for name in found)) for at in (0, 1))
    names.remove(kinds.PLAIN)
    for nth, (model, color) in enumerate(zip(models, _COLORS, strict=False)):
        plain = found[f"{model}: {kinds.PLAIN}"]["perplexity"]
        there = [at for at, name in enumerate(names) if f"{model}: {name}" in found]
        worse = [found[f"{model}: {names[at]}"]["perplexity"] / plain - 1 for at in there]
        places = [at + (nth - 0.5) * 0.35 for at in there]
        axes.barh(places, [100 * own for own in worse], 0.3, color=color, label=model)
    axes.set(yticks=range(len(names)), yticklabels=names, xscale="symlog")
    axes.set(xlabel="perplexity beside the plain cache, %")
    axes.invert_yaxis()
    axes.legend()


def _draw_seconds(axes: Any, found: Rows) -> None:
    for nth, own in enumerate(found.values()):
        base = found[own["beside"]]
        for context, color in zip(own["measured_s"], _COLORS, strict=False):
            label = None if nth else f"{int(context):,} tokens"
            took, said = (
                own[of][context] / base[of][context] for of in ("measured_s", "predicted_s")
            )
            axes.plot(took, nth, "o", color=color, label=label)
            axes.plot(said, nth, "|", markersize=20, color=color)
    labels = [f"{name} / {own['beside']}" for name, own in found.items()]
    axes.set(yticks=range(len(found)), yticklabels=labels, xlim=(0, None))
    axes.set(xlabel="step beside what it shrinks (line: predicted, dot: measured)")
    axes.invert_yaxis()
    axes.legend()


def text(parts: dict[str, Rows], picture: str) -> str:
    """The page of what was measured."""
    parts = measured.in_order(parts)
    sections: dict[str, Callable[[Rows], list[str]]] = {
        "bytes": functools.partial(_of_bytes, published=parts.get("published", {})),
        "quality": _of_quality,
        "needle": _of_needles,
        "time": _of_seconds,
        "batch": _of_batches,
        "overload": _of_overload,
    }
    lines = [
        "# Smaller caches: what they gain, and what they cost",
        "",
        "    python -m scripts.reports.caches",
        "",
        "Written by that command from what it has measured; each section says when and where.",
        "[Less to cache](architecture.md#less-to-cache) says how each of them works.",
    ]
    if "quality" in parts:
        lines += ["", f"![Quality and time of smaller caches]({picture})"]
    for part, section in sections.items():
        if part in parts:
            lines += ["", *section(parts[part])]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Measures, and writes the page."""
    check(argv, _PARTS.value, _MEASURE)
    page = Path(_OUTPUT.value)
    picture = page.with_suffix(".png")
    results = Results(page.with_suffix(".json"))
    for part in _PARTS.value:
        chosen = {"models": _MODELS.value} if part == "quality" else {}
        _MEASURE[part](results, _ROWS.value or (), **chosen)
    written = text(results.parts, picture.name)
    if "quality" in results.parts:
        picture.write_bytes(_picture(measured.in_order(results.parts)))
    page.write_text(written, "utf-8")


if __name__ == "__main__":
    app.run(main)
