"""`bench --plot`: rates over concurrency, distributions of latencies, gains of techniques."""

import itertools
from collections.abc import Sequence
from typing import Any

from inference.benchmark.drive import Run
from scripts.reports import bench_text
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

_MEASURED, _PREDICTED = "#332288", "#DDCC77"  # of Paul Tol's muted scheme


def closed(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: rate, and time between tokens, over the number of requests at a time."""

    def draw(rates: Axes, gaps: Axes) -> None:
        sizes = [row["concurrency"] for row in rows]
        for axes, key, scale in ((rates, "output_tok_s", 1.0), (gaps, "itl_p50_s", 1e3)):
            measured = [scale * row[key] for row in rows]
            predicted = [scale * row["predicted"][key] for row in rows]
            axes.plot(sizes, measured, "o-", color=_MEASURED, label="measured")
            axes.plot(sizes, predicted, "s--", color=_PREDICTED, label="predicted")
            axes.set(xlabel="requests at a time", ylim=(0, None))
            axes.legend(fontsize=8)
        rates.set_ylabel("output tokens a second")
        gaps.set_ylabel("ms between tokens (p50)")

    return figures.png(title, draw)


def latencies(runs: Sequence[Run], title: str) -> bytes:
    """A PNG: share of the requests within a time, and what ran when; of all the runs."""

    def draw(shares: Axes, running: Axes) -> None:
        requests = [request for run in runs for request in run.requests]
        gaps = [gap for request in requests for gap in request.gaps_s]
        for values, name, color in (
            ([request.ttft_s for request in requests], "first token", "#332288"),
            (gaps, "between tokens", "#117733"),
            ([request.e2e_s for request in requests], "end to end", "#CC6677"),
        ):
            ranks = [(rank + 1) / len(values) for rank in range(len(values))]
            shares.step(sorted(values), ranks, where="post", color=color, label=name)
        shares.set(xscale="log", xlabel="seconds", ylabel="share within", ylim=(0, 1))
        shares.legend(fontsize=8)
        for run in runs:
            times = list(itertools.accumulate(usage.seconds for usage in run.usage))
            counts = [usage.num_running for usage in run.usage]
            running.step(times, counts, where="post", color=_MEASURED, alpha=0.6)
        running.set(xlabel="seconds of steps", ylabel="running requests", ylim=(0, None))

    return figures.png(title, draw)


def ablation(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: each ablation's gain on its own metric, and the rate it ends up with."""

    def draw(gains: Axes, rates: Axes) -> None:
        gained = [row for row in rows if row["measured"]["gain"] is not None]
        names = [
            f"{row['rung']} over {row['over']}\n{bench_text.METRICS[row['metric']][0]}"
            for row in gained
        ]
        for offset, kind, color in ((-0.2, "measured", _MEASURED), (0.2, "predicted", _PREDICTED)):
            places = [index + offset for index in range(len(gained))]
            times = [row[kind]["gain"] for row in gained]
            bars = gains.barh(places, times, height=0.38, color=color, label=kind)
            gains.bar_label(bars, fmt="%.2f x", fontsize=7, padding=2)
            tok_s = [row[kind]["figures"]["output_tok_s"] for row in rows]
            places = [index + offset for index in range(len(rows))]
            rates.barh(places, tok_s, height=0.38, color=color, label=kind)
        gains.set(xscale="log", xlabel="times better")
        gains.xaxis.set_major_formatter("{x:g}")
        gains.xaxis.set_minor_formatter("{x:g}")
        gains.set_yticks(range(len(gained)), names, fontsize=7)
        gains.axvline(1, color="0.6", linewidth=1)
        rates.set(xlabel="output tokens a second")
        rates.set_yticks(range(len(rows)), [row["rung"] for row in rows], fontsize=8)
        for axes in (gains, rates):
            axes.invert_yaxis()
            axes.legend(fontsize=8)

    return figures.png(title, draw)
