"""What the drills and the comparisons of a server gave on one machine, as a page.

python docs/make_server.py --drills A.json B.json ... --compared vllm.json engine.json \
        --grammars=grammars.txt --replicas=replicas.txt > docs/results/server-NAME.md
"""

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare import processor  # noqa: E402
from compare_servers import FIGURES  # noqa: E402

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
    for name in ("drills", "compared"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=())
    for name in ("grammars", "replicas"):
        parser.add_argument(f"--{name}", type=Path)
    paths = parser.parse_args()
    print("# A server\n")
    print(f"{datetime.date.today()}, {processor()}; SmolLM2-135M in bfloat16, clients beside it")
    print("on the same cores. Written by `docs/make_server.py` from what `docs/make_drills.py` and")
    print("`docs/compare_servers.py` wrote, `measure_grammars.py` and `drill_replicas.py` printed.")
    if paths.drills:
        print("\n## Faults\n")
        print("| drill | | what came of it |\n|---|---|---|")
        drills: dict[str, Any] = {}  # of a drill that was repeated, the last
        for path in paths.drills:
            drills |= read(path)["drills"]
        for name, found in drills.items():
            holds = "holds" if found["holds"] else "**does not hold**"
            print(f"| `{name}` | {holds} | {found['text']} |")
    for path in paths.compared:
        _show_compared(read(path))
    for title, path in (
        ("Grammars", paths.grammars), ("Two replicas, one of which is killed", paths.replicas),
    ):  # fmt: skip
        if path is not None:
            print(f"\n## {title}\n")
            print(path.read_text(encoding="utf-8").strip())


def _show_compared(found: dict[str, Any]) -> None:
    beside = found["given"]["beside"]
    print(f"\n## {_BESIDE[beside]}\n")
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
