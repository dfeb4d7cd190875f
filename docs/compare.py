"""Two engines on the same work, measured in turn, as a page: medians and ratios.

    python docs/compare.py --ours RUN.json ... --theirs RUN.json ... > docs/results/NAME.md

Ours are what `python -m scripts.bench --json` prints, theirs one JSON object each with the keys
that `scripts.bench --beside` reads.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
from pathlib import Path

NAMES = {
    "output_tok_s_1": "output tokens/s, 1 request",
    "output_tok_s_8": "output tokens/s, 8 requests",
    "output_tok_s_32": "output tokens/s, 32 requests",
    "prefill_tok_s": "prefill tokens/s",
    "first_token_s": "seconds from process start to the first token",
}


def flatten(run: dict) -> dict[str, float]:
    """A run of `scripts.bench` under the keys of a peer."""
    rates = {f"output_tok_s_{row['concurrency']}": row["output_tok_s"] for row in run["rows"]}
    return rates | {name: run[name] for name in ("prefill_tok_s", "first_token_s")}


def processor() -> str:
    """The processor's own name and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Python {platform.python_version()}"


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", nargs="+", type=Path, required=True)
    parser.add_argument("--theirs", nargs="+", type=Path, required=True)
    paths = parser.parse_args()
    ours = [flatten(json.loads(path.read_text(encoding="utf-8"))) for path in paths.ours]
    theirs = [json.loads(path.read_text(encoding="utf-8")) for path in paths.theirs]
    peer = theirs[0]["peer"]
    print(f"# Beside {peer}\n")
    print(f"{datetime.date.today()}, {processor()}; {len(ours)} runs of each in turn, A, B, A, B.")
    print("Prompts of 64 random tokens, 48 new ones, greedy; prefill of prompts of 500.")
    print(f"Written by `docs/compare.py` from what `scripts.bench --json` and {peer} printed.\n")
    print(f"| median (each run) | Ridgeline | {peer} | ratio of medians | ratio of each pair |")
    print("|---|---|---|---|---|")
    for key, name in NAMES.items():
        if any(key not in run for run in theirs):
            continue  # what this peer does not do
        mine, other = ([run[key] for run in runs] for runs in (ours, theirs))
        pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, other, strict=True))
        cells = [
            f"{statistics.median(v):.1f} ({', '.join(f'{x:.1f}' for x in v)})"
            for v in (mine, other)
        ]
        ratio = statistics.median(mine) / statistics.median(other)
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} | {pairs} |")


if __name__ == "__main__":
    main()
