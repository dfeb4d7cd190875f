"""What `scripts.bench --json` printed of a live workload, as a page.

python docs/make_serving.py --ladder=L.json --interference=I.json ... --host_cost=H.json \
        --plain=P.json --deterministic=D.json > docs/results/NAME.md
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare import processor  # noqa: E402

from scripts import bench_text  # noqa: E402


def read(path: Path) -> dict[str, Any]:
    """One JSON object."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser()
    for name in ("ladder", "host_cost", "plain", "deterministic"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--interference", type=Path, nargs="+", required=True)
    paths = parser.parse_args()
    print("# A live workload\n")
    print(f"{datetime.date.today()}, {processor()}; medians of 3 runs, SmolLM2-135M in bfloat16.")
    print("Written by `docs/make_serving.py` from what `scripts.bench --json` printed.\n")

    ladder = read(paths.ladder)
    print("## One idea more a rung\n\n    python -m scripts.bench --ladder --repeats=3\n\n```")
    print(bench_text.LADDER_HEAD.rstrip())
    for row in ladder["ladder"]:
        print(bench_text.ladder_row(row).rstrip())
    bench_text.show_waste(ladder["waste"])
    bench_text.show_ladder_notes(ladder)
    print("```\n\n## Tokens beside a long prompt\n")
    for path in paths.interference:
        found = read(path)["interference"]
        sizes = f"{found['running']} running, tiles of {found['tile_tokens']} tokens"
        print(f"{sizes}, a prompt of {found['long_tokens']}:\n\n```")
        bench_text.show_interference(found, found["predicted"])
        print("```\n")
    print("## The host's part of a step\n\n    python -m scripts.bench --host_cost\n\n```")
    bench_text.show_host_cost(read(paths.host_cost)["host_cost"])
    print("```\n\n## What determinism costs\n")
    print("    python -m scripts.bench --concurrency=1,8,32 --set=engine.deterministic=true\n")
    print("| requests at a time | tokens/s | deterministic | cost |\n|---|---|---|---|")
    pairs = zip(read(paths.plain)["rows"], read(paths.deterministic)["rows"], strict=True)
    for plain, fixed in pairs:
        rates = plain["output_tok_s"], fixed["output_tok_s"]
        cost = 1 - rates[1] / rates[0]
        print(f"| {plain['concurrency']} | {rates[0]:.1f} | {rates[1]:.1f} | {cost:.1%} |")


if __name__ == "__main__":
    main()
