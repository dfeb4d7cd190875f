"""This engine beside another one on the same work and the same cores, by turns, as a page.

    python -m scripts.reports.peers vllm --model=HF_DIRECTORY --python=VENV/bin/python --preload=...
    python -m scripts.reports.peers llama.cpp --model=FILE.gguf --python=VENV/bin/python

Each turn runs `scripts.bench` and then the peer's script of this folder in an environment of its
own, which prints one JSON object; the next turn begins with the other one. A first run of each is
not counted: it fills both compile caches. The page goes to standard output.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PEERS = {"vllm": "scripts/reports/peers/vllm_cpu.py", "llama.cpp": "scripts/reports/peers/llama.py"}
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--model", required=True, help="a checkpoint that both read")
    parser.add_argument("--python", required=True, help="that has the peer")
    parser.add_argument("--preload", default="", help="libraries that the peer recommends")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {"ridgeline": [], "peer": []}
    commands = {
        "ridgeline": (bench_command(options), {}),
        "peer": (
            [options.python, PEERS[options.peer], options.model],
            {"LD_PRELOAD": options.preload},
        ),
    }
    for turn in range(options.turns + 1):
        for side in list(commands)[:: -1 if turn % 2 else 1]:
            figures = printed(*commands[side])
            print(f"turn {turn}: {side} {figures}", file=sys.stderr)
            if turn:
                runs[side].append(figures)
    engine_runs = [flatten(run) for run in runs["ridgeline"]]
    print("\n".join(page(options, engine_runs, runs["peer"])))


def bench_command(options: argparse.Namespace) -> list[str]:
    """`scripts.bench` on the peer's work."""
    return [
        sys.executable, "-m", "scripts.bench", "--json", f"--model={options.model}",
        f"--weights={WEIGHTS[options.peer]}", "--concurrency=1,8,32", f"--prompt_tokens={PROMPT}",
        f"--new_tokens={NEW}", f"--prefill_tokens={PREFILL}", "--set=engine.max_context=1024",
    ]  # fmt: skip


def printed(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON object that a command prints on its last line."""
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with status {run.returncode}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def flatten(run: dict[str, Any]) -> dict[str, float]:
    """A run of `scripts.bench` under the keys of a peer."""
    rates = {f"output_tok_s_{row['concurrency']}": row["output_tok_s"] for row in run["rows"]}
    return rates | {name: run[name] for name in ("prefill_tok_s", "first_token_s")}


def processor() -> str:
    """The processor's own name, how many of its cores this process may use, and what it has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    flags = facts.get("flags", "").split()
    sets = [n for n in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if n in flags]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {facts['model name']} ({', '.join(sets)})"


def page(
    options: argparse.Namespace,
    engine_runs: list[dict[str, float]],
    peer_runs: list[dict[str, Any]],
) -> list[str]:
    """Lines of the page: medians, every run, and ratios."""
    preload = ", ".join(Path(path).name for path in options.preload.split(":") if path)
    lines = [
        f"# Beside {options.peer}", "",
        f"{datetime.date.today()}, {processor()}, Python {platform.python_version()}; both engines "
        f"compute on all of these cores. {options.turns} runs",
        f"of each by turns, the first one not counted. Prompts of {PROMPT} random tokens, {NEW} "
        f"new ones, greedy; prefill of four prompts of {PREFILL}.",
        f"`{Path(options.model).name}`, `--weights={WEIGHTS[options.peer]}` here; {options.peer}: "
        f"{peer_runs[0]['settings']}{f', preloaded {preload}' if preload else ''}.",
        "Written by `scripts.reports.peers`.", "",
        f"| median (each run) | Ridgeline | {options.peer} | ratio | ratio of each pair |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for key, name in NAMES.items():
        if key not in peer_runs[0]:
            continue  # what this peer does not do
        sides = [[run[key] for run in runs] for runs in (engine_runs, peer_runs)]
        medians = [statistics.median(side) for side in sides]
        cells = [
            f"{median:.1f} ({', '.join(f'{figure:.1f}' for figure in side)})"
            for median, side in zip(medians, sides, strict=True)
        ]
        pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(*sides, strict=True))
        ratio = medians[0] / medians[1]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} | {pairs} |")
    return lines


if __name__ == "__main__":
    main()
