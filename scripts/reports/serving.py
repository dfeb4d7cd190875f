"""What `scripts.bench --json` printed of a live workload, as a page.

python -m scripts.reports.serving --ablation=A.json --interference I.json ... --host_cost=H.json \
        --determinism PLAIN.json DETERMINISTIC.json > docs/results/NAME.md
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from scripts.reports import bench_text
from scripts.reports.peers.__main__ import processor


def read(path: Path) -> dict[str, Any]:
    """One JSON object."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Prints the page: a section for each file."""
    parser = argparse.ArgumentParser()
    for name in ("ablation", "host_cost"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--interference", type=Path, nargs="+", default=())
    parser.add_argument("--determinism", type=Path, nargs=2, metavar=("PLAIN", "DETERMINISTIC"))
    paths = parser.parse_args()
    print("# A live workload\n")
    print(f"{datetime.date.today()}, {processor()}; medians of 3 runs, SmolLM2-135M in bfloat16.")
    print("Written by `scripts.reports.serving` from what `scripts.bench --json` printed.")
    if paths.ablation:
        _show_ablation(read(paths.ablation))
    if paths.interference:
        print("\n## Tokens beside a long prompt")
    for path in paths.interference:
        found = read(path)["interference"]
        running, chunk = found["running"], found["tile_tokens"]
        print(f"\n    python -m scripts.bench --interference --running={running} ", end="")
        print(f"--set=engine.shapes.chunk_tokens={chunk}\n")
        print(f"A prompt of {found['long_tokens']}:\n\n```")
        bench_text.show_interference(found, found["predicted"])
        print("```")
    if paths.host_cost:
        print("\n## The host's part of a step\n\n    python -m scripts.bench --host_cost\n\n```")
        bench_text.show_host_cost(read(paths.host_cost)["host_cost"])
        print("```")
    if paths.determinism:
        _show_determinism(*(read(path)["rows"] for path in paths.determinism))


def _show_ablation(found: dict[str, Any]) -> None:
    print("\n## One technique after another\n")
    print("    python -m scripts.bench --ablation --repeats=3\n\n```")
    print(bench_text.ABLATION_HEAD.rstrip())
    for row in found["ladder"]:
        print(bench_text.ablation_row(row).rstrip())
    bench_text.show_waste(found["waste"])
    bench_text.show_ablation_notes(found)
    print("```")


def _show_determinism(plain: list[dict[str, Any]], fixed: list[dict[str, Any]]) -> None:
    print("\n## What determinism costs\n")
    print("    python -m scripts.bench --concurrency=1,8,32 [--set=engine.deterministic=true]\n")
    print("| requests at a time | tokens/s | deterministic | cost |\n|---|---|---|---|")
    for one, other in zip(plain, fixed, strict=True):
        rates = one["output_tok_s"], other["output_tok_s"]
        cost = 1 - rates[1] / rates[0]
        print(f"| {one['concurrency']} | {rates[0]:.1f} | {rates[1]:.1f} | {cost:.1%} |")


if __name__ == "__main__":
    main()
