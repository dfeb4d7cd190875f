"""`bench` as tables: measured beside predicted."""

from collections.abc import Mapping
from typing import Any

from scripts.reports import tables

_STATISTICS = ("mean", "p50", "p90", "p99")
_LATENCIES = {
    "ttft": "first token, s",
    "tpot": "output token, s",
    "itl": "between tokens, s",
    "e2e": "end to end, s",
}
_FIGURES = {
    "output_tok_s": ("output tok/s", "{:.1f}"),
    "requests_s": ("requests/s", "{:.2f}"),
    "goodput_requests_s": ("goodput, requests/s", "{:.2f}"),
    "goodput_share": ("goodput, share", "{:.0%}"),
    "running_mean": ("running, mean", "{:.1f}"),
    "running_peak": ("running, peak", "{:.0f}"),
    "kv_waste": ("page room without a token", "{:.1%}"),
    "prompt_sharing": ("prompt pages saved by sharing", "{:.1%}"),
    "hit_rate": ("prompt tokens found in cache", "{:.1%}"),
    "prefilled_tokens": ("prompt tokens computed", "{:.0f}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "steps": ("steps", "{:.0f}"),
}
# How an ablation's metric is shown.
METRICS = _FIGURES | {
    "ttft_p50_s": ("first token p50, s", "{:.2f}"),
    "itl_p99_s": ("between tokens p99, s", "{:.3f}"),
}


def show_closed(result: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """A rate a row, beside another engine's where there is one."""
    peer = beside.get("peer", "")
    rows = result["rows"]
    lines = [
        (
            f"output tok/s at {row['concurrency']}",
            row["output_tok_s"],
            f"output_tok_s_{row['concurrency']}",
            row["predicted_output_tok_s"],
        )
        for row in rows
    ]
    lines += [("prefill tok/s", result["prefill_tok_s"], "prefill_tok_s", None)]
    lines += [("first token, s", result["first_token_s"], "first_token_s", None)]
    print(f"{'':22}{'ridgeline':>10}{'predicted':>11}{peer:>12}{'ratio' if peer else '':>8}")
    for name, value, key, predicted in lines:
        shown = f"{predicted:11.1f}" if predicted else " " * 11
        other = beside.get(key)
        shown += f"{other:12.1f}{value / other:8.2f}" if other else ""
        print(f"{name:22}{value:10.1f}{shown}".rstrip())
    decoded = result["decode_bandwidth_share"]
    if decoded is not None:
        smallest = min(row["concurrency"] for row in rows)
        print(
            f"of rates measured in this run: decoding at {smallest} "
            f"{tables.bandwidth_share(decoded, result['read_bandwidth'])}, prefill "
            f"{result['prefill_rate_share']:.0%} of the best product's "
            f"{result['best_product_rate'] / 1e9:.0f} GFLOP/s"
        )
    if result["peaks"]:
        _show_peaks(result)
    last = rows[-1]
    print(
        f"at {last['concurrency']}: page room without a token {last['kv_waste']:.1%}, host "
        f"{1e3 * last['host_step_s']:.2f} ms a step; {_compiles(result)}"
    )
    if by_group := _waste_by_group(result, last):
        print("page room without a token by group: " + ", ".join(map(": ".join, by_group)))
    _show_snapshots(result)
    print(
        f"sampled (temperature 0.8, top-p 0.95, top-k 50) runs at "
        f"{result['sampled_share']:.2f} x the greedy rate; "
        f"{result['shapes']} shapes compiled in {result['warm_up_s']:.0f} s"
    )


def load_table(result: Mapping[str, Any]) -> list[str]:
    """Rates and latencies of a closed load, greedy and sampled, measured beside predicted."""
    names = ("output tok/s", "first token s", "p99", "between ms", "host ms")
    lines = [f"{'requests':24}" + "".join(f"{name:>14}" for name in names)]
    rows = [(f"{row['concurrency']} greedy", row) for row in result["rows"]]
    sampled = result.get("sampled")
    rows += [(f"{sampled['concurrency']} sampled", sampled)] if sampled else []
    for name, row in rows:
        for label, figures in ((name, row), ("  predicted", row["predicted"])):
            first, last = figures["ttft_p50_s"], figures["ttft_p99_s"]
            lines.append(
                f"{label:24}{figures['output_tok_s']:14.1f}{first:14.3f}{last:14.3f}"
                f"{1e3 * figures['itl_p50_s']:14.2f}{1e3 * figures['host_step_s']:14.2f}"
            )
    if "prefill_tok_s" in result:
        share = f"{result['prefill_rate_share']:.0%} of the product's rate"
        lines.append(f"prefill {result['prefill_tok_s']:.0f} tok/s, {share}")
    return lines


def _show_peaks(result: Mapping[str, Any]) -> None:
    """What the processor's multiply-adds reach at most, and what steps do of it."""
    peaks = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in result["peaks"].items())
    print(f"all cores multiply and add at most, GFLOP/s: {peaks}")
    to_peak = result["best_product_rate"] / result["product_peak"]
    batch, largest = result["batch_rate_share"], max(row["concurrency"] for row in result["rows"])
    parts = [f"prefill {result['prefill_rate_share'] * to_peak:.0%}"]
    parts += [] if batch is None else [f"decoding at {largest} {batch * to_peak:.0%}"]
    print(
        f"of the {result['product_peak'] / 1e9:,.0f} GFLOP/s of these weights: {', '.join(parts)}, "
        f"the best product {to_peak:.0%}"
    )


def show_open(result: Mapping[str, Any]) -> None:
    """Latencies and rates of one row, measured over predicted."""
    (row,) = result["rows"]
    print(f"{'':30}" + "".join(f"{name:>10}" for name in _STATISTICS))
    for key, name in _LATENCIES.items():
        for label, figures in ((name, row), ("  predicted", row["predicted"])):
            values = (figures[f"{key}_{statistic}_s"] for statistic in _STATISTICS)
            print(f"{label:30}" + "".join(f"{value:10.3f}" for value in values))
    print(f"\n{'':30}{'measured':>10}{'predicted':>10}")
    for key, (name, form) in _FIGURES.items():
        cells = (form.format(figures[key]) for figures in (row, row["predicted"]))
        print(f"{name:30}" + "".join(f"{cell:>10}" for cell in cells))
        if key == "kv_waste":
            measured, predicted = (_waste_by_group(result, f) for f in (row, row["predicted"]))
            for (group, waste), (_, planned) in zip(measured, predicted, strict=True):
                print(f"{f'  that see {group}':30}{waste:>10}{planned:>10}")
    print()
    if "turns" in row:
        _show_turns(row["turns"], row["predicted"]["turns"])
    _show_snapshots(result)
    print(f"host {1e3 * row['host_step_s']:.2f} ms a step; {_compiles(result)}")


ABLATION_HEAD = (
    f"{'ablation':12}{'over':12}{'metric':26}{'before':>9}{'after':>9}{'gain':>8}   predicted:"
    f"{'before':>9}{'after':>9}{'gain':>8}"
)


def ablation_row(row: Mapping[str, Any]) -> str:
    """An ablation: its metric without the technique and with it, measured and predicted."""
    name, form = METRICS[row["metric"]]

    def cells(pair: Mapping[str, Any]) -> str:
        before = "" if pair["before"] is None else form.format(pair["before"])
        gain = "" if pair["gain"] is None else f"{pair['gain']:.2f} x"
        return f"{before:>9}{form.format(pair['after']):>9}{gain:>8}"

    names = f"{row['rung']:12}{row['over'] or '':12}{name:26}"
    return f"{names}{cells(row['measured'])}{'':13}{cells(row['predicted'])}"


def show_ablation_notes(result: Mapping[str, Any]) -> None:
    workload, rows = result["workload"], {row["rung"]: row for row in result["ladder"]}
    print(
        f"\n{workload['num_requests']} requests at {workload['rate']:.2f} a second, "
        f"{result['cache_bytes'] / 1e6:.0f} MB of cache; executables compiled while serving: "
        f"{result['compiles']}; predicted by: {result['predicted_by']}"
    )
    if "naive" in rows:
        count = rows["naive"]["measured"]["figures"]["scaled_from_requests"]
        print(f"naive: {count:.0f} of the requests, scaled by tokens")
    if "overlap" in rows:
        figures = rows["overlap"]["measured"]["figures"]
        equal = figures.get("equal_tokens")
        print(
            f"overlap: host {1e3 * figures['host_step_s']:.2f} ms a step"
            + ("" if equal is None else f", tokens of {equal:.0%} of the requests equal")
            + ("" if rows["overlap"]["measured"]["before"] is None else "; by turns with chunked")
        )


def show_waste(rows: list[dict[str, Any]]) -> None:
    """Room without a token for several sizes of page."""
    print(f"\n{'page room without a token':30}{'measured':>10}{'predicted':>10}{'half a page':>13}")
    for row in rows:
        print(
            f"{'pages of ' + str(row['page_tokens']):30}{row['kv_waste']:10.1%}"
            f"{row['predicted_kv_waste']:10.1%}{row['half_page']:13.1%}"
        )


def show_interference(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> None:
    """Time between tokens alone and beside a long prompt."""
    names = ("between tokens: p50, ms", "p99, ms", "times", "predicted", "first token, s")
    print(" " * 12 + "".join(f"{name:>{max(len(name) + 2, 10)}}" for name in names))
    for name in (name for name in predicted if name in measured):
        row, expected = measured[name], predicted[name]
        line = f"{name:12}{1e3 * row['itl_p50_s']:25.1f}{1e3 * row['itl_p99_s']:10.1f}"
        if "ttft_s" in row:
            line += f"{row['times_undisturbed']:8.2f} x{expected['times_undisturbed']:9.2f} x"
            line += f"{row['ttft_s']:16.2f}"
        print(line)


def show_host_cost(rows: list[dict[str, Any]]) -> None:
    """Milliseconds a step."""
    names = ("schedule", "build", "commit", "total", "total_p99")
    print(f"{'running':>8}" + "".join(f"{name.replace('_', ' ') + ', ms':>15}" for name in names))
    for row in rows:
        cells = "".join(f"{1e3 * row[f'{name}_s']:15.3f}" for name in names)
        print(f"{row['num_running']:8}{cells}")


def _waste_by_group(result: Mapping[str, Any], figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of each page group, where there are several, what its layers see, and its waste."""
    names = enumerate(result["page_groups"])
    return [
        (name, f"{figures[key]:.1%}") for g, name in names if (key := f"kv_waste_{g}") in figures
    ]


def _show_turns(turns: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> None:
    """A row for each turn of the agents' sessions; what is cached in tokens of all prompts."""
    names = ("requests", "prompt", "cached", "kept", "new", "first token, s", "predicted, s")
    print(f"{'turn':6}" + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in names))
    for row, expected in zip(turns, predicted, strict=False):
        kept_share = f"{row['kept_share']:.1%}" if "kept_share" in row else ""
        print(
            f"{row['turn']:<6}{row['requests']:9.0f}{row['prompt_tokens']:9.0f}"
            f"{row['hit_rate']:9.1%}{kept_share:>9}{row['new_tokens']:9.0f}"
            f"{row['ttft_p50_s']:16.3f}{expected['ttft_p50_s']:14.3f}"
        )
    print()


def _show_snapshots(result: Mapping[str, Any]) -> None:
    """Of a model with states: what its prefixes go on from."""
    last, distance = result["rows"][-1], result["snapshot_tokens"]
    if last["snapshots"]:
        print(
            f"{last['snapshots']} snapshots of states, one of them a sink, take "
            f"{last['snapshot_bytes'] / 1e6:.1f} MB of each chip"
            + (f"; of a prompt one every {distance:,} tokens" if distance else "")
        )


def _compiles(result: Mapping[str, Any]) -> str:
    return (
        f"executables compiled after warm-up: {sum(row['compiles'] for row in result['rows'])}; "
        f"predicted by: {result['predicted_by']}"
    )
