"""What fewer bits gain, and what they cost.

    python -m scripts.train
    python -m scripts.reports.quantization

measures and writes docs/quantization.md and its picture, or --output. Each figure is kept beside
the page (quantization.json) with its date and machine, so that a part can be measured alone, or
some rows of it (--parts=quality '--rows=int8,"int4 g64, GPTQ"'), and the page be written anew from
what is there (--parts=). What was never measured has no section. Only `speed` needs an idle
machine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from scripts.reports.pages.results import Results, Rows, bar, check, prose, table, when
from scripts.reports.plots import figures
from scripts.reports.quantization import measured

_MEASURE: dict[str, Callable[..., None]] = {
    "quality": measured.quality,
    "outlier": measured.outlier,
    "memory": measured.memory,
    "speed": measured.speed,
}
_OUTPUT = flags.DEFINE_string("output", "docs/quantization.md", "the page")
_PARTS = flags.DEFINE_list("parts", list(_MEASURE), "what to measure")
_ROWS = flags.DEFINE_list("rows", None, "only these rows of the parts")
_MODELS = flags.DEFINE_list("models", None, "only these models")

# By how much of its share perplexity may be worse, as was required of the small model.
_MOST_WORSE = {"int8": 0.003, "LLM.int8()": 0.001, "fp8": 0.01}
_LEAST_RECOVERED = 0.3  # of rounding's loss, by AWQ and GPTQ with groups of 64
_MOST_WORSE_PLANTED = 0.01
_MOST_RESIDENT = 0.35  # of the bytes in bfloat16 of the matrices that have four bits
_LEAST_TIMES = {"int8": 1.5, "int4": 2.2}
_COLORS = ("#332288", "#88CCEE", "#44AA99", "#DDCC77")  # of Paul Tol's muted scheme


def _of_quality(found: Rows) -> list[str]:
    lines = [
        "## Quality",
        *prose(
            f"{measured.TOKENS:,} tokens that no method saw, in windows of {measured.WINDOW}, in",
            "float32: the source of `absl` for the small model, by XLA's products, so that nothing",
            "is rounded but weights, and activations where a format says so; Python's help topics",
            "for the others, as they are served, which on a CPU rounds activations too. KL is that",
            "of the full model's law of the next token to the quantized one's, in nats; agreement",
            "is how often both have the same likeliest token.",
            "`recovered` is the share of rounding's divergence that a method takes back: that of",
            "perplexity can have either sign where a text is not what a model knows best.",
            "Methods were calibrated on the source of `argparse`, QAT on the standard library's.",
            f"MB are of weights as scored, the full model's in float32. {when(found)}.",
        ),
    ]
    models = list(dict.fromkeys(name.split(": ")[0] for name in found))
    for model in models:
        own = {
            name.split(": ")[1]: row for name, row in found.items() if name.startswith(f"{model}:")
        }
        lines += ["", f"### {_TITLES[model]}", *table(_QUALITY, list(_quality_rows(model, own)))]
    return lines


_TITLES = {
    measured.SMALL: "The small model, trained here in float32",
    "smollm2-135m": "SmolLM2-135M, whose weights were in blocks of 4 bits before",
    "gemma3-270m": "Gemma 3 270M, likewise",
}
_QUALITY = ("format", "MB", "perplexity", "change", "recovered", "KL", "agreement", "seconds",
            "required")  # fmt: skip


def _quality_rows(model: str, own: Rows) -> Any:
    full = own["full"]
    for kind, row in own.items():
        worse = row["perplexity"] / full["perplexity"] - 1
        recovered = _recovered(own, kind)
        required = ""
        if model == measured.SMALL:
            required = bar(worse, _MOST_WORSE.get(kind))
            if recovered is not None and "g64" in kind and kind.endswith(("AWQ", "GPTQ")):
                required = bar(recovered, _LEAST_RECOVERED, is_least=True)
            if recovered is not None and kind.endswith("QAT"):
                format = kind.partition(", ")[0]
                others = (own[f"{format}, {name}"]["kl"] for name in ("AWQ", "GPTQ")
                          if f"{format}, {name}" in own)  # fmt: skip
                required = bar(recovered, 1 - min(others) / own[f"{format}, rtn"]["kl"], True)
        yield (
            kind, f"{row['weight_bytes'] / 1e6:.2f}", f"{row['perplexity']:.4f}", f"{worse:+.2%}",
            "" if recovered is None else f"{recovered:.0%}",
            f"{row['kl']:.5f}" if "kl" in row else "",
            f"{row['agreement']:.2%}" if "agreement" in row else "",
            f"{row['seconds']:.0f}" if "seconds" in row else "", required,
        )  # fmt: skip


def _recovered(own: Rows, kind: str) -> float | None:
    """Of rounding's divergence in the same format, the share that is taken back."""
    format, _, method = kind.partition(", ")
    if method not in ("AWQ", "GPTQ", "QAT", "rotation and GPTQ") or f"{format}, rtn" not in own:
        return None
    rounded: float = own[f"{format}, rtn"]["kl"]
    return 1 - float(own[kind]["kl"]) / rounded


def _of_outlier(found: Rows) -> list[str]:
    full, rows = found["full"]["perplexity"], []
    for kind, own in found.items():
        worse = own["perplexity"] / full - 1
        required = None if kind in ("full", "w8a8, absmax") else _MOST_WORSE_PLANTED
        rows.append((kind, f"{own['perplexity']:.4f}", f"{worse:+.2%}", bar(worse, required)))
    return [
        "## One feature much larger than the others",
        *prose(
            "The small model where each norm makes the feature that it weighs most",
            f"{measured.OUTLIER:g} times as large and the matrices that read it are as much",
            "smaller there: the same function. The scale by which a token is rounded to eight bits",
            "is its largest number's, so all other features lose what this one takes (Dettmers et",
            f"al. 2022, arXiv 2208.07339). {when(found)}.",
        ),
        *table(("weights and activations", "perplexity", "change", "required"), rows),
    ]


def _of_memory(found: Rows) -> list[str]:
    rows = []
    for model, own in found.items():
        for when_, saved in (("loaded", own["loading"]), ("running", own["running"])):
            share = 1 - (saved - own["tables_saved"]) / own["matrices"]
            judged = (f"{share:.2f}", bar(share, _MOST_RESIDENT))
            if share < 0:
                judged = ("none", "loading bfloat16 takes more than its matrices")
            sizes = (f"{own['matrices'] / 1e6:.0f}", f"{saved / 1e6:.0f}")
            rows.append((model, when_, *sizes, *judged))
    peaks = ", ".join(
        f"{own['calibration'] / 1e6:.0f} MB of {model} ({own['model'] / 1e6:.0f} MB in bfloat16)"
        for model, own in found.items()
    )
    return [
        "## Memory",
        *prose(
            "How much less a process takes at its peak with `--weights=int4` than with bfloat16,",
            "of a native directory, by its resident bytes: medians of three pairs. Tables, which",
            "have eight bits, are taken off before the share. A whole process that calibrates",
            f"GPTQ takes, Python and JAX included, {peaks}. {when(found)}.",
        ),
        *table(("model", "while", "MB of matrices in bfloat16", "MB less", "share", "required"),
               rows),
    ]  # fmt: skip


def _of_speed(found: Rows) -> list[str]:
    rows = []
    for name, own in found.items():
        model, format = name.split(": ")
        for count, step in own["rows"].items():
            required = _LEAST_TIMES.get(format) if count == "1" else 1.0 if count == "32" else None
            rows.append((
                model, format, count, f"{step['step_bytes'] / 1e6:.0f}",
                f"{step['predicted_s'] * 1e3:.1f}", f"{step['measured_s'] * 1e3:.1f}",
                f"{step['predicted']:.2f}", f"{step['times']:.2f}",
                bar(step["times"], required, is_least=True),
            ))  # fmt: skip
    columns = (
        "model", "format", "requests", "MB a step", "predicted, ms", "measured, ms",
        "times bfloat16, predicted", "measured", "required",
    )  # fmt: skip
    return [
        "## A decode step's time",
        *prose(
            "At 256 tokens of context, bfloat16's cache and activations, medians of",
            f"{measured.REPEATS} runs and of three pairs, bfloat16 first each time. Where matrices",
            "have fewer than eight bits, tables have eight; `file` is the published 4-bit file as",
            "it is. The planner's constants come from bfloat16's steps; of a format it knows bytes",
            f"and the rate of its products. {when(found)}.",
        ),
        *table(columns, rows),
    ]


def _picture(parts: dict[str, Rows]) -> bytes:
    def draw(left: Any, right: Any) -> None:
        _draw_quality(left, parts["quality"])
        if "speed" in parts:
            _draw_speed(right, parts["speed"])
        else:
            right.set_axis_off()

    return figures.png("What fewer bits cost, and what they gain", draw)


def _draw_quality(axes: Any, found: Rows) -> None:
    own = {name.split(": ")[1]: row for name, row in found.items() if name.startswith("small:")}
    full = own.pop("full")
    methods = {"rtn": [], "AWQ": [], "GPTQ": [], "QAT": []}  # type: dict[str, list[Any]]
    for kind, row in own.items():
        method = kind.partition(", ")[2]
        point = row["weight_bytes"] / full["weight_bytes"], row["perplexity"] / full["perplexity"]
        methods["rtn" if method not in methods else method].append((point[0], 100 * point[1] - 100))
    for (method, points), color in zip(methods.items(), _COLORS, strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=color, label=method)
    axes.set(xlabel="bytes beside float32's", ylabel="perplexity beside it, %", yscale="symlog")
    axes.legend()


def _draw_speed(axes: Any, found: Rows) -> None:
    names = list(found)
    for nth, own in enumerate(found.values()):
        axes.plot(own["rows"]["1"]["times"], nth, "o", color=_COLORS[0])
        axes.plot(own["rows"]["1"]["predicted"], nth, "|", markersize=20, color=_COLORS[0])
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, None))
    axes.set(xlabel="bfloat16's step over it, one request (line: predicted, dot: measured)")
    axes.invert_yaxis()


def text(parts: dict[str, Rows], picture: str) -> str:
    """The page of what was measured."""
    parts = dict(measured.in_order(parts))
    sections = {
        "quality": _of_quality, "outlier": _of_outlier, "memory": _of_memory, "speed": _of_speed,
    }  # fmt: skip
    lines = [
        "# Fewer bits: what they gain, and what they cost",
        "",
        "    python -m scripts.train",
        "    python -m scripts.reports.quantization",
        "",
        "Written by the latter from what it has measured; each section says when and where.",
        "[Quantize](quantize.md) says how to make such weights, [kernels](kernels.md) what",
        "multiplies them.",
    ]
    if "quality" in parts:
        lines += ["", f"![Perplexity by bytes, and speed by format]({picture})"]
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
        chosen = {} if _MODELS.value is None or part == "outlier" else {"models": _MODELS.value}
        _MEASURE[part](results, _ROWS.value or (), **chosen)
    parts = dict(measured.in_order(results.parts))
    if "quality" in parts:
        picture.write_bytes(_picture(parts))
    page.write_text(text(results.parts, picture.name), "utf-8")


if __name__ == "__main__":
    app.run(main)
