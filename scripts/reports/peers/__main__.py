"""This engine and another one on the same work and the same cores, by turns, as a page.

    python -m scripts.reports.peers vllm --model=HF_DIRECTORY --python=VENV/bin/python --preload=...
    python -m scripts.reports.peers llama.cpp --model=FILE.gguf --python=VENV/bin/python

Each turn runs `scripts.bench` and then the peer's script of this folder in an environment of its
own, which prints one JSON object; the next turn begins with the other one. A first run of each is
not counted: it fills both compile caches. The page goes to standard output.
"""

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.reports.pages.markdown import table
from scripts.reports.pages.results import Row
from scripts.reports.peers.turns import alternate, libraries, printed, processor

PEERS = {"vllm": "vllm_cpu.py", "llama.cpp": "llama.py"}
WEIGHTS = {"vllm": "bfloat16", "llama.cpp": "file"}
PROMPT, NEW, PREFILL = 64, 48, 500
NAMES = {
    "output_tok_s_1": "output tokens/s, 1 request",
    "output_tok_s_8": "output tokens/s, 8 requests",
    "output_tok_s_32": "output tokens/s, 32 requests",
    "prefill_tok_s": "prefill tokens/s",
    "first_token_s": "seconds from process start to the first token",
}


def main() -> None:
    """Runs both by turns and prints the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--model", required=True, help="a checkpoint that both read")
    parser.add_argument("--python", required=True, help="that has the peer")
    parser.add_argument("--preload", default="", help="libraries that the peer recommends")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    script = str(Path(__file__).with_name(PEERS[options.peer]))

    def run_engine(_: int) -> Row:
        return _flatten(printed(bench_command(options)))

    def run_peer(_: int) -> Row:
        return printed([options.python, script, options.model], {"LD_PRELOAD": options.preload})

    rows = alternate({"engine": run_engine, "peer": run_peer}, options.turns, lambda turn: turn)
    print("\n".join(page(options, rows)))


def bench_command(options: argparse.Namespace) -> list[str]:
    """Returns the command of `scripts.bench` on the peer's work."""
    return [
        sys.executable, "-m", "scripts.bench", "--json", f"--model={options.model}",
        f"--weights={WEIGHTS[options.peer]}", "--concurrency=1,8,32", f"--prompt_tokens={PROMPT}",
        f"--new_tokens={NEW}", f"--prefill_tokens={PREFILL}", "--set=engine.max_context=1024",
    ]  # fmt: skip


def _flatten(run: Row) -> Row:
    """Returns a run of `scripts.bench` under the keys of a peer."""
    rates = {f"output_tok_s_{row['concurrency']}": row["output_tok_s"] for row in run["rows"]}
    return rates | {name: run[name] for name in ("prefill_tok_s", "first_token_s")}


def page(options: argparse.Namespace, rows: Sequence[dict[str, Row]]) -> list[str]:
    """Formats medians, every run, and ratios."""
    peer = rows[0]["peer"]
    lines = []
    for key, name in NAMES.items():
        if key not in peer:
            continue  # the peer does not do this
        sides = [[row[side][key] for row in rows] for side in ("engine", "peer")]
        medians = [statistics.median(side) for side in sides]
        cells = [
            f"{median:.1f} ({', '.join(f'{figure:.1f}' for figure in side)})"
            for median, side in zip(medians, sides, strict=True)
        ]
        pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(*sides, strict=True))
        lines.append((name, *cells, f"{medians[0] / medians[1]:.2f}", pairs))
    columns = ("median (each run)", "Ridgeline", options.peer, "ratio", "ratio of each pair")
    return [
        f"# Beside {options.peer}", "",
        f"{datetime.date.today()}, {processor()}, Python {platform.python_version()}; both engines "
        f"compute on all of these cores. {options.turns} runs",
        f"of each by turns, the first one not counted. Prompts of {PROMPT} random tokens, {NEW} "
        f"new ones, greedy; prefill of four prompts of {PREFILL}.",
        f"`{Path(options.model).name}`, `--weights={WEIGHTS[options.peer]}` here; {options.peer}: "
        f"{peer['settings']}{libraries(options.preload)}.",
        "Written by `scripts.reports.peers`.",
        *table(columns, lines),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
