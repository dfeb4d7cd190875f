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


def show(found: Mapping[str, Any]) -> None:
    """Latencies, rates, and what failed."""
    print(f"{'':24}" + "".join(f"{name:>11}" for name in _STATISTICS))
    for key, name in _LATENCIES.items():
        cells = "".join(f"{found[f'{each}_{key}_ms']:11.2f}" for each in _STATISTICS)
        print(f"{name:24}{cells}")
    print()
    rows = {
        "requests": f"{found['completed']} of {found['num_prompts']}",
        "seconds": f"{found['duration']:.2f}",
        "requests/s": f"{found['request_throughput']:.2f}",
        "output tok/s": f"{found['output_throughput']:.1f}",
        "all tok/s": f"{found['total_token_throughput']:.1f}",
        "prompt tokens cached": f"{found['cached_tokens']} of {found['total_input_tokens']}",
    }
    if found["request_goodput"] is not None:
        rows["goodput, requests/s"] = f"{found['request_goodput']:.2f}"
    for name, value in rows.items():
        print(f"{name:24}{value:>20}")
    for reason, count in list(found["failures"].items())[:_SHOWN_FAILURES]:
        print(f"failed, {count}: {reason}")
