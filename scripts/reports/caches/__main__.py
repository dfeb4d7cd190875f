"""What each way to shrink the cache gains, and what it costs.

    python -m scripts.reports.caches

measures and writes docs/caches.md and its picture, or --output. Figures are kept next to the page
(caches.json) with date and machine, so that a part can be measured alone, or some rows of it
(--parts=quality --rows=int8,fp8 --models=smollm2-135m), and the page be written from what is there
(--parts=). A part that was never measured has no section. Only `time` needs an idle machine.
"""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from inference.benchmark import steps
from scripts.reports.caches import kinds, measured
from scripts.reports.pages import results
from scripts.reports.pages.markdown import prose, table
from scripts.reports.pages.results import COLORS, Part, Rows, verdict, when
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

# By how much of its share a row may be worse than the plain cache's, as was required.
_MAX_LOSS = {kinds.INT8: 0.002, "fp8": 0.01, kinds.QUEST: 0.03}
_MIN_NEEDLES = {kinds.QUEST: 0.9}
_MIN_AT_ONCE = {kinds.INT8: 1.9}


def _bytes_section(rows: Rows) -> list[str]:
    for name, row in rows.items():
        for pool in ("", "pool_"):
            predicted, allocated = row[f"{pool}predicted"], row[f"{pool}allocated"]
            if predicted != allocated:
                sys.exit(f"{name}: {predicted} bytes are predicted, {allocated} allocated")
    reference = {name: row for name, row in rows.items() if name not in measured.PUBLISHED_BYTES}
    published = {name: row for name, row in rows.items() if name in measured.PUBLISHED_BYTES}
    return [
        "## Bytes",
        *prose(
            f"{kinds.REFERENCE.name}'s widths (30 layers, 9 heads of 64), {when(reference)}. GQA",
            "has 3 KV heads, and so have all others but MHA, MQA, MLA, DSA and V4; a latent vector",
            "has four heads' elements, its rotary key half of one's. Bytes are predicted by the",
            "planner and counted in the arrays of an engine with room for one sequence of",
            f"{measured.LENGTH:,} tokens and the page that padding is written to. A window keeps",
            "less the longer a sequence is; Quest and DSA keep all, and read less. V4 keeps an",
            "entry as wide as a latent vector for every 4 or 128 tokens, and of a window of 128",
            "each token's own vector and what entries are pooled from, most of its bytes a token.",
        ),
        *_bytes_table(reference, kinds.MHA),
        *prose(
            "Character.AI's stack (one KV head, windows of 1,024 in five layers of six, each cache",
            "read by two layers; 36 layers of Llama 2 13B's width) beside the same layers with a",
            f"KV head for each query head and no windows, {when(published)}; the arrays are for",
            "one sequence of 256 tokens:",
        ),
        *_bytes_table(published, list(published)[-1]),
    ]


def _bytes_table(rows: Rows, base: str) -> list[str]:
    lines = [
        (
            name, f"{row['predicted']:,.0f}", f"{row['allocated']:,.0f}",
            f"{row['pool_predicted']:,}", f"{row['pool_allocated']:,}",
            f"{row['held'] / 2**20:,.1f}", f"{rows[base]['held'] / row['held']:.2f}",
        )
        for name, row in rows.items()
    ]  # fmt: skip
    columns = (
        "cache", "a token, predicted", "allocated", "pages, predicted", "allocated",
        f"of {measured.CONTEXTS[0]:,} tokens, MiB", "times smaller",
    )  # fmt: skip
    return table(columns, lines)


def _quality_section(rows: Rows) -> list[str]:
    lines = []
    for name, row in rows.items():
        model, _, kind = name.partition(": ")
        change = row["perplexity"] / rows[f"{model}: {kinds.PLAIN}"]["perplexity"] - 1
        lines.append((
            model, kind, f"{row['perplexity']:.4f}", f"{change:+.2%}", f"{row['agreement']:.2%}",
            verdict(change, _MAX_LOSS.get(kind)),
        ))  # fmt: skip
    columns = ("model", "cache", "perplexity", "change", "same likeliest token", "required")
    tokens = next(iter(rows.values()))["tokens"]
    return [
        "## Quality",
        *prose(
            f"{tokens:,} tokens of Python's help topics, scored in pieces of {measured.LENGTH:,},",
            f"weights and activations in bfloat16, {when(rows)}. Quest reads {kinds.BUDGET}",
            "tokens in pages of 16, a quarter of a whole piece; every query does, those of prompts",
            f"too. Gemma's own windows of {kinds.WINDOW} stay, so Quest and windows of the others",
            "change three layers of its 18.",
        ),
        *table(columns, lines),
    ]


def _needle_section(rows: Rows) -> list[str]:
    plain = sum(rows[kinds.PLAIN]["found"])
    lines = []
    for name, row in rows.items():
        hits = row["found"]
        share = sum(hits) / plain
        lines.append((
            name, f"{sum(hits)} of {len(hits)}", "".join(".●"[hit] for hit in hits),
            f"{share:.2f}", verdict(share, _MIN_NEEDLES.get(name), is_least=True),
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
            f"{when(rows)}.",
        ),
        *table(columns, lines),
    ]


def _time_section(rows: Rows) -> list[str]:
    lines = []
    for name, row in rows.items():
        base = rows[row["beside"]]
        for context, measured_s in row["measured_s"].items():
            predicted_s = row["predicted_s"][context]
            lines.append((
                name, f"{int(context):,}", f"{predicted_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}",
                f"{predicted_s / measured_s:.2f}", row["beside"],
                f"{predicted_s / base['predicted_s'][context]:.2f}",
                f"{measured_s / base['measured_s'][context]:.2f}",
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
            f"{when(rows)}. The planner's constants come from steps of the plain model, those of",
            f"the others calibrate nothing. Quest reads {kinds.LONG_BUDGET:,} tokens,",
            f"DSA {kinds.TOP_K}.",
        ),
        *table(columns, lines),
        *prose(
            "One constant stands for what attention reaches, in prefill and decoding alike, found",
            "at no more than 1,024 tokens: so plain decoding over many is predicted too slow, and",
            "what is compared with it seems to gain more than it does. int8 computes as many",
            "products as bfloat16. An indexer scores every token, or entry. V4's mixers run as",
            "small operations of XLA, whose time depends on nothing that is read: with a stride of",
            "128 as much at 256 tokens as at 16,384 (`docs/log.md`).",
        ),
    ]


def _models_and_kinds(rows: Rows) -> tuple[list[str], list[str]]:
    names = [name.split(": ") for name in rows]
    return list(dict.fromkeys(m for m, _ in names)), list(dict.fromkeys(k for _, k in names))


def _batch_section(rows: Rows) -> list[str]:
    models, names = _models_and_kinds(rows)
    points = list(itertools.product(models, measured.LENGTHS))
    lines = []
    for kind in names:
        counts = (rows[f"{model}: {kind}"]["sequences"][f"{length}"] for model, length in points)
        lines.append((kind, *(f"{count:,}" for count in counts)))
    columns = ("cache", *(f"{model}, {length:,}" for model, length in points))
    return [
        "## The largest batch in 80 GB",
        *prose(
            "Sequences of so many tokens that fit beside the weights, as the planner says",
            f"({when(rows)}): Llama 2 13B in bfloat16, 70B with weights of four bits, since in",
            "bfloat16 they take 138 GB. GQA has 8 KV heads, with which 70B was published; 13B was",
            "with MHA.",
        ),
        *table(columns, lines),
    ]


def _overload_section(rows: Rows) -> list[str]:
    plain, lines = rows[kinds.PLAIN], []
    statistics = {"running_p50": "median", "running_mean": "mean", "running_peak": "most"}
    for name, row in rows.items():
        cells = [(f"{row[key]:.4g}", f"{row[key] / plain[key]:.2f}") for key in statistics]
        ratio = row["running_mean"] / plain["running_mean"]
        lines.append((
            name, *itertools.chain(*cells), f"{row['preemptions']:.0f}",
            verdict(ratio, _MIN_AT_ONCE.get(name), is_least=True),
        ))  # fmt: skip
    pairs = ((label, "times") for label in statistics.values())
    columns = ("cache", *itertools.chain(*pairs), "preemptions", "required of the mean")
    low, high = measured.LOAD_TOKENS
    return [
        "## Requests at once in equal memory",
        *prose(
            f"{measured.LOAD.num_requests} requests come together, with prompts and answers of",
            f"{low} to {high} tokens each, to an engine with",
            f"{measured.CACHE_BYTES >> 20} MiB of pages for a model that caches what",
            f"{kinds.REFERENCE.name} does. How many it ran at once: the median of its steps,",
            f"the mean over time, and the most. {when(rows)}.",
        ),
        *table(columns, lines),
    ]


_TRAINED, _DECLARED = list(kinds.trained(kinds.REFERENCE)), list(kinds.declared(kinds.REFERENCE))
PARTS = {
    "bytes": Part(measured.bytes_held, _bytes_section, [*_DECLARED, *measured.PUBLISHED_BYTES]),
    "quality": Part(
        measured.quality, _quality_section, measured.of_models(measured.MODELS, _TRAINED), True
    ),
    "needle": Part(measured.needles, _needle_section, [*_TRAINED, kinds.SNAP]),
    "time": Part(measured.seconds, _time_section, list(kinds.timed(kinds.REFERENCE))),
    "batch": Part(
        measured.batch, _batch_section, measured.of_models(measured.PUBLISHED, _DECLARED)
    ),
    "overload": Part(measured.overload, _overload_section, list(kinds.at_once(kinds.REFERENCE))),
}


def _picture(parts: Mapping[str, Rows]) -> bytes:
    def draw(quality: Axes, time: Axes) -> None:
        _draw_quality(quality, parts["quality"])
        if "time" in parts:
            _draw_time(time, parts["time"])
        else:
            time.set_axis_off()

    return figures.png("What less cache costs, and what it gains", draw)


def _draw_quality(axes: Axes, rows: Rows) -> None:
    models, names = _models_and_kinds(rows)
    names.remove(kinds.PLAIN)
    for nth, (model, color) in enumerate(zip(models, COLORS, strict=False)):
        plain = rows[f"{model}: {kinds.PLAIN}"]["perplexity"]
        present = [at for at, name in enumerate(names) if f"{model}: {name}" in rows]
        changes = [rows[f"{model}: {names[at]}"]["perplexity"] / plain - 1 for at in present]
        places = [at + (nth - 0.5) * 0.35 for at in present]
        axes.barh(places, [100 * change for change in changes], 0.3, color=color, label=model)
    axes.set(yticks=range(len(names)), yticklabels=names, xscale="symlog")
    axes.set(xlabel="perplexity beside the plain cache, %")
    axes.invert_yaxis()
    axes.legend()


def _draw_time(axes: Axes, rows: Rows) -> None:
    for nth, row in enumerate(rows.values()):
        base = rows[row["beside"]]
        for context, color in zip(row["measured_s"], COLORS, strict=False):
            label = None if nth else f"{int(context):,} tokens"
            ratios = {key: row[key][context] / base[key][context]
                      for key in ("measured_s", "predicted_s")}  # fmt: skip
            axes.plot(ratios["measured_s"], nth, "o", color=color, label=label)
            axes.plot(ratios["predicted_s"], nth, "|", markersize=20, color=color)
    labels = [f"{name} / {row['beside']}" for name, row in rows.items()]
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlim=(0, None))
    axes.set(xlabel="step beside what it shrinks (line: predicted, dot: measured)")
    axes.invert_yaxis()
    axes.legend()


def text(measured: Mapping[str, Rows], picture: str) -> str:
    """Returns the page; `picture` is its picture's name."""
    parts = results.in_order(PARTS, measured)
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
    for name, rows in parts.items():
        lines += ["", *PARTS[name].section(rows)]
    return "\n".join(lines) + "\n"


def _write(measured: Mapping[str, Rows], page: Path) -> None:
    picture, written = page.with_suffix(".png"), text(measured, page.with_suffix(".png").name)
    if "quality" in measured:
        picture.write_bytes(_picture(results.in_order(PARTS, measured)))
    page.write_text(written, "utf-8")


if __name__ == "__main__":
    results.run(__doc__, "docs/caches.md", PARTS, _write)
