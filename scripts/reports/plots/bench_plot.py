"""`bench --plot`: rates over concurrency, distributions of latencies, gains of techniques."""

from collections.abc import Sequence
from typing import Any

from inference.benchmark.drive import Run
from scripts.reports import bench_text
from scripts.reports.plots import figures

_MEASURED, _PREDICTED = "#332288", "#DDCC77"  # of Paul Tol's muted scheme


def closed(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: rate, and time between tokens, over the number of requests at a time."""

    def draw(left: Any, right: Any) -> None:
        sizes = [row["concurrency"] for row in rows]
        for axes, key, scale in ((left, "output_tok_s", 1.0), (right, "itl_p50_s", 1e3)):
            measured = [scale * row[key] for row in rows]
            predicted = [scale * row["predicted"][key] for row in rows]
            axes.plot(sizes, measured, "o-", color=_MEASURED, label="measured")
            axes.plot(sizes, predicted, "s--", color=_PREDICTED, label="predicted")
            axes.set(xlabel="requests at a time", ylim=(0, None))
            axes.legend(fontsize=8)
        left.set_ylabel("output tokens a second")
        right.set_ylabel("ms between tokens (p50)")

    return figures.png(title, draw)


def latencies(runs: Sequence[Run], title: str) -> bytes:
    """A PNG: share of the requests within a time, and what ran when; of all the runs."""

    def draw(left: Any, right: Any) -> None:
        requests = [each for run in runs for each in run.requests]
        gaps = [gap for each in requests for gap in each.gaps_s]
        for values, name, colour in (
            ([each.ttft_s for each in requests], "first token", "#332288"),
            (gaps, "between tokens", "#117733"),
            ([each.e2e_s for each in requests], "end to end", "#CC6677"),
        ):
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            left.step(sorted(values), shares, where="post", color=colour, label=name)
        left.set(xscale="log", xlabel="seconds", ylabel="share within", ylim=(0, 1))
        left.legend(fontsize=8)
        for run in runs:
            now, times, running = 0.0, [], []
            for usage in run.usage:
                now += usage.seconds
                times.append(now)
                running.append(usage.num_running)
            right.step(times, running, where="post", color=_MEASURED, alpha=0.6)
        right.set(xlabel="seconds of steps", ylabel="running requests", ylim=(0, None))

    return figures.png(title, draw)


def ablation(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: each ablation's gain on its own metric, and the rate it ends up with."""

    def draw(left: Any, right: Any) -> None:
        gained = [row for row in rows if row["measured"]["gain"] is not None]
        names = [
            f"{row['rung']} over {row['over']}\n{bench_text.METRICS[row['metric']][0]}"
            for row in gained
        ]
        for offset, kind, colour in ((-0.2, "measured", _MEASURED), (0.2, "predicted", _PREDICTED)):
            places = [index + offset for index in range(len(gained))]
            gains = [row[kind]["gain"] for row in gained]
            bars = left.barh(places, gains, height=0.38, color=colour, label=kind)
            left.bar_label(bars, fmt="%.2f x", fontsize=7, padding=2)
            rates = [row[kind]["figures"]["output_tok_s"] for row in rows]
            places = [index + offset for index in range(len(rows))]
            right.barh(places, rates, height=0.38, color=colour, label=kind)
        left.set(xscale="log", xlabel="times better")
        left.xaxis.set_major_formatter("{x:g}")
        left.xaxis.set_minor_formatter("{x:g}")
        left.set_yticks(range(len(gained)), names, fontsize=7)
        left.axvline(1, color="0.6", linewidth=1)
        right.set(xlabel="output tokens a second")
        right.set_yticks(range(len(rows)), [row["rung"] for row in rows], fontsize=8)
        for axes in (left, right):
            axes.invert_yaxis()
            axes.legend(fontsize=8)

    return figures.png(title, draw)
