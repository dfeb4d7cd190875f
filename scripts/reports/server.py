"""What the comparisons of a server gave on one machine, as a page.

python -m scripts.reports.server --compared vllm.json engine.json --grammars=grammars.txt \
        > docs/results/server-NAME.md
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

from scripts.reports.peers.__main__ import processor
from scripts.reports.peers.servers import FIGURES

_BESIDE = {
    "vllm": "Beside vLLM's server for CPUs (0.32.0)",
    "engine": "What HTTP adds: the server beside its own engine in a process without it",
}


def read(path: Path) -> dict[str, Any]:
    """One JSON object."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Prints the page: a section for each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compared", type=Path, nargs="+", default=())
    parser.add_argument("--grammars", type=Path)
    paths = parser.parse_args()
    print("# A server\n")
    print(f"{datetime.date.today()}, {processor()}; SmolLM2-135M in bfloat16, clients beside it")
    printed = " and `scripts.reports.grammars` printed" if paths.grammars else ""
    print("on the same cores. Written by `scripts.reports.server` from what")
    print(f"`scripts.reports.peers.servers` wrote{printed}.")
    for path in paths.compared:
        _show_compared(read(path))
    if paths.grammars:
        print("\n## Grammars\n")
        print(paths.grammars.read_text(encoding="utf-8").strip())


def _show_compared(found: dict[str, Any]) -> None:
    beside = found["given"]["beside"]
    print(f"\n## {_BESIDE[beside]}\n")
    if beside == "vllm":
        names = [Path(path).name for path in found["given"]["preload"].split(":") if path]
        more = f", preloaded {', '.join(names)}" if names else ""
        print(f"vLLM compiles, and is bound to all of these cores{more}.")
    print(f"Prompts of 64 random tokens, 48 new ones; {found['given']['turns']} turns of each, one")
    print("after the other; medians, and the median of each turn's ratio.\n")
    print(f"| load | figure | Ridgeline | {beside} | ratio |\n|---|---|---|---|---|")
    for load, turns in found["turns"].items():
        for key, name in FIGURES.items():
            ours, theirs = ([turn[side][key] for turn in turns] for side in ("ours", beside))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            middle = f"{statistics.median(ours):.1f} | {statistics.median(theirs):.1f}"
            print(f"| {load} | {name} | {middle} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
