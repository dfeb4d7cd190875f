"""What fewer bits gain, and what they cost.

    python -m scripts.train
    python -m scripts.reports.quantization

measures, and writes the tables of docs/quantization.md and its picture, or --output. Figures are
kept next to the page (quantization.json) with date and machine, so that a part can be measured
alone, or some rows of it (--parts=quality '--rows=int8,"int4 g64, GPTQ"' --models=small), and the
tables be written from what is there (--parts=). Only `speed` needs an idle machine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.reports.pages import results
from scripts.reports.pages.markdown import prose, table
from scripts.reports.pages.results import COLORS, Part, Rows, verdict
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes
from scripts.reports.quantization import measured

# By how much of its share perplexity may be worse, as was required of the small model.
_MAX_LOSS = {"int8": 0.003, "LLM.int8()": 0.001, "fp8": 0.01}
_MIN_RECOVERED = 0.3  # of rounding's loss, by AWQ and GPTQ with groups of 64
_MAX_LOSS_PLANTED = 0.01
_MAX_RESIDENT = 0.35  # of the bytes in bfloat16 of the matrices that have four bits
_MIN_SPEEDUP = {("int8", "1"): 1.5, ("int4", "1"): 2.2}
_TITLES = {
    measured.SMALL: "The small model, trained here in float32",
    "smollm2-135m": "SmolLM2-135M, whose weights were in blocks of 4 bits before",
    "gemma3-270m": "Gemma 3 270M, likewise",
}


def _quality_tables(rows: Rows) -> list[str]:
    columns = (
        "format", "MB", "perplexity", "change", "recovered", "KL", "agreement", "seconds",
        "required",
    )  # fmt: skip
    lines = []
    for model in dict.fromkeys(name.partition(": ")[0] for name in rows):
        kinds = _of_model(rows, model)
        lines += ["", f"### {_TITLES[model]}", *table(columns, [*_quality_rows(model, kinds)])]
    return lines


def _of_model(rows: Rows, model: str) -> Rows:
    return {
        name.partition(": ")[2]: row for name, row in rows.items() if name.startswith(f"{model}: ")
    }


def _quality_rows(model: str, rows: Rows) -> Iterator[tuple[str, ...]]:
    full = rows["full"]
    for kind, row in rows.items():
        change = row["perplexity"] / full["perplexity"] - 1
        recovered = _recovered(rows, kind)
        yield (
            kind, f"{row['weight_bytes'] / 1e6:.2f}", f"{row['perplexity']:.4f}", f"{change:+.2%}",
            "" if recovered is None else f"{recovered:.0%}",
            f"{row['kl']:.5f}" if "kl" in row else "",
            f"{row['agreement']:.2%}" if "agreement" in row else "",
            f"{row['seconds']:.0f}" if "seconds" in row else "",
            _quality_verdict(rows, kind, change, recovered) if model == measured.SMALL else "",
        )  # fmt: skip


def _recovered(rows: Rows, kind: str) -> float | None:
    """Returns the share of rounding's divergence in the same format that a method takes back."""
    format, _, method = kind.partition(", ")
    if method not in ("AWQ", "GPTQ", "QAT", "rotation and GPTQ") or f"{format}, rtn" not in rows:
        return None
    rounded: float = rows[f"{format}, rtn"]["kl"]
    return 1 - float(rows[kind]["kl"]) / rounded


def _quality_verdict(rows: Rows, kind: str, change: float, recovered: float | None) -> str:
    format, _, method = kind.partition(", ")
    if recovered is not None and "g64" in kind and method in ("AWQ", "GPTQ", "rotation and GPTQ"):
        return verdict(recovered, _MIN_RECOVERED, is_least=True)
    if recovered is not None and method == "QAT":  # as good as the best of the others
        shares = [_recovered(rows, f"{format}, {other}") for other in ("AWQ", "GPTQ")
                  if f"{format}, {other}" in rows]  # fmt: skip
        return verdict(recovered, max(s for s in shares if s is not None), is_least=True)
    return verdict(change, _MAX_LOSS.get(kind))


def _outlier_table(rows: Rows) -> list[str]:
    full, lines = rows["full"]["perplexity"], []
    for kind, row in rows.items():
        change = row["perplexity"] / full - 1
        limit = None if kind in ("full", "w8a8, absmax") else _MAX_LOSS_PLANTED
        lines.append((kind, f"{row['perplexity']:.4f}", f"{change:+.2%}", verdict(change, limit)))
    return table(("weights and activations", "perplexity", "change", "required"), lines)


def _memory_table(rows: Rows) -> list[str]:
    lines = []
    for model, row in rows.items():
        for label, saved in (("loaded", row["loading"]), ("running", row["running"])):
            share = 1 - (saved - row["tables_saved"]) / row["matrices"]
            cells = (f"{share:.2f}", verdict(share, _MAX_RESIDENT))
            if share < 0:
                cells = ("none", "loading bfloat16 takes more than its matrices")
            sizes = (f"{row['matrices'] / 1e6:.0f}", f"{saved / 1e6:.0f}")
            lines.append((model, label, *sizes, *cells))
    columns = ("model", "while", "MB of matrices in bfloat16", "MB less", "share", "required")
    peaks = (
        f"{row['calibration'] / 1e6:.0f} MB of {model} ({row['model'] / 1e6:.0f} MB in bfloat16)"
        for model, row in rows.items()
    )
    calibration = f"A process that calibrates GPTQ takes, with Python and JAX: {', '.join(peaks)}."
    return [*table(columns, lines), *prose(calibration)]


def _speed_table(rows: Rows) -> list[str]:
    lines = []
    for name, row in rows.items():
        model, format = name.split(": ")
        for count, step in row["rows"].items():
            limit = 1.0 if count == "32" else _MIN_SPEEDUP.get((format, count))
            lines.append((
                model, format, count, f"{step['step_bytes'] / 1e6:.0f}",
                f"{step['predicted_s'] * 1e3:.1f}", f"{step['measured_s'] * 1e3:.1f}",
                f"{step['predicted']:.2f}", f"{step['times']:.2f}",
                verdict(step["times"], limit, is_least=True),
            ))  # fmt: skip
    columns = (
        "model", "format", "requests", "MB a step", "predicted, ms", "measured, ms",
        "times bfloat16, predicted", "measured", "required",
    )  # fmt: skip
    return table(columns, lines)


PARTS = {
    "quality": Part(measured.quality, _quality_tables, measured.QUALITY_ROWS, True),
    "outlier": Part(measured.outlier, _outlier_table, measured.OUTLIER_ROWS),
    "memory": Part(measured.memory, _memory_table, measured.PUBLISHED, True),
    "speed": Part(measured.speed, _speed_table, measured.SPEED_ROWS, True),
}


def _picture(parts: Mapping[str, Rows]) -> bytes:
    def draw(quality: Axes, speed: Axes) -> None:
        _draw_quality(quality, _of_model(parts["quality"], measured.SMALL))
        if "speed" in parts:
            _draw_speed(speed, parts["speed"])
        else:
            speed.set_axis_off()

    return figures.png("What fewer bits cost, and what they gain", draw)


def _draw_quality(axes: Axes, rows: Rows) -> None:
    full = rows["full"]
    points: dict[str, list[tuple[float, float]]] = {"rtn": [], "AWQ": [], "GPTQ": [], "QAT": []}
    for kind, row in rows.items():
        method = kind.partition(", ")[2]
        size, loss = (row[key] / full[key] for key in ("weight_bytes", "perplexity"))
        if kind != "full":
            points[method if method in points else "rtn"].append((size, 100 * loss - 100))
    for (method, places), color in zip(points.items(), COLORS, strict=True):
        if places:
            axes.plot(*zip(*places, strict=True), "o", color=color, label=method)
    axes.set(xlabel="bytes beside float32's", ylabel="perplexity beside it, %", yscale="symlog")
    axes.legend()


def _draw_speed(axes: Axes, rows: Rows) -> None:
    for nth, row in enumerate(rows.values()):
        axes.plot(row["rows"]["1"]["times"], nth, "o", color=COLORS[0])
        axes.plot(row["rows"]["1"]["predicted"], nth, "|", markersize=20, color=COLORS[0])
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlim=(0, None))
    axes.set(xlabel="bfloat16's step over it, one request (line: predicted, dot: measured)")
    axes.invert_yaxis()


def _draw(parts: Mapping[str, Rows], path: Path) -> None:
    if "quality" in parts:
        path.write_bytes(_picture(parts))


if __name__ == "__main__":
    results.run(__doc__, "docs/quantization.md", PARTS, _draw)
