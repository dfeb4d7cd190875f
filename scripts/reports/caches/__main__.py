"""What each way to shrink the cache gains, and what it costs.

    python -m scripts.reports.caches

measures, and writes the tables of docs/caches.md and its picture, or --output. Figures are kept
next to the page (caches.json) with date and machine, so that a part can be measured alone, or some
rows of it (--parts=quality --rows=int8,fp8 --models=smollm2-135m), and the tables be written from
what is there (--parts=). Only `time` needs an idle machine.
"""

import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.reports.caches import kinds, measured
from scripts.reports.pages import results
from scripts.reports.pages.markdown import table
from scripts.reports.pages.results import COLORS, Part, Rows, verdict
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

# By how much of its share a row may be worse than the plain cache's, as was required.
_MAX_LOSS = {kinds.INT8: 0.002, "fp8": 0.01, kinds.QUEST: 0.03}
_MIN_NEEDLES = {kinds.QUEST: 0.9}
_MIN_AT_ONCE = {kinds.INT8: 1.9}


def _bytes_table(rows: Rows, base: str) -> list[str]:
    for name, row in rows.items():
        for pool in ("", "pool_"):
            predicted, allocated = row[f"{pool}predicted"], row[f"{pool}allocated"]
            if predicted != allocated:
                sys.exit(f"{name}: {predicted} bytes are predicted, {allocated} allocated")
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


def _quality_table(rows: Rows) -> list[str]:
    lines = []
    for name, row in rows.items():
        model, _, kind = name.partition(": ")
        change = row["perplexity"] / rows[f"{model}: {kinds.PLAIN}"]["perplexity"] - 1
        lines.append((
            model, kind, f"{row['perplexity']:.4f}", f"{change:+.2%}", f"{row['agreement']:.2%}",
            verdict(change, _MAX_LOSS.get(kind)),
        ))  # fmt: skip
    columns = ("model", "cache", "perplexity", "change", "same likeliest token", "required")
    return table(columns, lines)


def _needle_table(rows: Rows) -> list[str]:
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
    return table(columns, lines)


def _time_table(rows: Rows) -> list[str]:
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
    return table(columns, lines)


def _models_and_kinds(rows: Rows) -> tuple[list[str], list[str]]:
    names = [name.split(": ") for name in rows]
    return list(dict.fromkeys(m for m, _ in names)), list(dict.fromkeys(k for _, k in names))


def _batch_table(rows: Rows) -> list[str]:
    models, names = _models_and_kinds(rows)
    points = list(itertools.product(models, measured.LENGTHS))
    lines = []
    for kind in names:
        counts = (rows[f"{model}: {kind}"]["sequences"][f"{length}"] for model, length in points)
        lines.append((kind, *(f"{count:,}" for count in counts)))
    columns = ("cache", *(f"{model}, {length:,}" for model, length in points))
    return table(columns, lines)


def _overload_table(rows: Rows) -> list[str]:
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
    return table(columns, lines)


_TRAINED, _DECLARED = list(kinds.trained(kinds.REFERENCE)), list(kinds.declared(kinds.REFERENCE))
_PUBLISHED = list(kinds.published())
PARTS = {
    "bytes": Part(measured.bytes_held, functools.partial(_bytes_table, base=kinds.MHA), _DECLARED),
    "published": Part(
        measured.published_bytes, functools.partial(_bytes_table, base=_PUBLISHED[-1]), _PUBLISHED
    ),
    "quality": Part(
        measured.quality, _quality_table, measured.of_models(measured.MODELS, _TRAINED), True
    ),
    "needle": Part(measured.needles, _needle_table, [*_TRAINED, kinds.SNAP]),
    "time": Part(measured.seconds, _time_table, list(kinds.timed(kinds.REFERENCE))),
    "batch": Part(measured.batch, _batch_table, measured.of_models(measured.PUBLISHED, _DECLARED)),
    "overload": Part(measured.overload, _overload_table, list(kinds.at_once(kinds.REFERENCE))),
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


def _draw(parts: Mapping[str, Rows], path: Path) -> None:
    if "quality" in parts:
        path.write_bytes(_picture(parts))


if __name__ == "__main__":
    results.run(__doc__, "docs/caches.md", PARTS, _draw)
