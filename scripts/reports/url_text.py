"""`bench --url` as a table."""

from collections.abc import Mapping
from typing import Any

_STATISTICS = ("mean", "p50", "p90", "p99")
_LATENCIES = {
    "ttft": "first token, ms",
    "tpot": "output token, ms",
    "itl": "between events, ms",
    "e2el": "end to end, ms",
}
_SHOWN_FAILURES = 5


def show(result: Mapping[str, Any]) -> None:
    print(f"{'':24}" + "".join(f"{name:>11}" for name in _STATISTICS))
    for key, name in _LATENCIES.items():
        cells = "".join(f"{result[f'{statistic}_{key}_ms']:11.2f}" for statistic in _STATISTICS)
        print(f"{name:24}{cells}")
    print()
    rows = {
        "requests": f"{result['completed']} of {result['num_prompts']}",
        "seconds": f"{result['duration']:.2f}",
        "requests/s": f"{result['request_throughput']:.2f}",
        "output tok/s": f"{result['output_throughput']:.1f}",
        "all tok/s": f"{result['total_token_throughput']:.1f}",
        "prompt tokens cached": f"{result['cached_tokens']} of {result['total_input_tokens']}",
    }
    if result["request_goodput"] is not None:
        rows["goodput, requests/s"] = f"{result['request_goodput']:.2f}"
    for name, value in rows.items():
        print(f"{name:24}{value:>20}")
    for reason, count in list(result["failures"].items())[:_SHOWN_FAILURES]:
        print(f"failed, {count}: {reason}")
