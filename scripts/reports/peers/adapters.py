"""Adapters beside vLLM's on the same work and the same cores, by turns, as a page.

    python -m scripts.reports.peers.adapters --model=HF_DIRECTORY --python=VENV/bin/python \
        --preload=...

Both engines serve 8 random adapters of rank 16 on all matrices, in the format of the `peft`
package; requests take them in turn. Each turn runs both, each in a process of its own, and the next
one begins with the other. A first run of each is not counted: it fills both compile caches. The
page goes to standard output.
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from scripts.reports.pages.markdown import prose, table
from scripts.reports.pages.results import Row
from scripts.reports.peers.turns import alternate, libraries, printed, processor

ADAPTERS, RANK = 8, 16
REQUESTS, PROMPT, NEW = 32, 64, 48
PREFILL = 500  # tokens of each of four prompts
NAMES = {
    "output_tok_s": f"output tokens/s, {REQUESTS} requests",
    "prefill_tok_s": "prefill tokens/s",
}


def main() -> None:
    """Runs both by turns and prints the page; with --adapters measures this engine alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint that both read")
    parser.add_argument("--python", help="that has vLLM")
    parser.add_argument("--preload", default="", help="libraries that vLLM recommends")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--adapters", type=Path, help="folder of adapters: prints one JSON object")
    options = parser.parse_args()
    if options.adapters is not None:
        print(json.dumps(_measured(options.model, options.adapters)))
        return
    if options.python is None:
        parser.error("--python names the interpreter that has vLLM")
    with tempfile.TemporaryDirectory() as folder:
        _draw(options.model, Path(folder))
        ours = [sys.executable, "-m", "scripts.reports.peers.adapters", f"--model={options.model}"]
        script = str(Path(__file__).with_name("vllm_cpu.py"))
        rows = alternate(
            {
                "engine": lambda _: printed([*ours, f"--adapters={folder}"]),
                "peer": lambda _: printed(
                    [options.python, script, options.model, folder], {"LD_PRELOAD": options.preload}
                ),
            },
            options.turns,
            lambda turn: turn,
        )
    print("\n".join(_page(options, rows)))


def _draw(model: str, folder: Path) -> None:
    """Writes random adapters of a model into folders of their own."""
    from inference.adapters import modules, peft_directory
    from inference.checkpoints import resolve

    config = resolve.resolve(model).config
    for nth in range(ADAPTERS):
        generator = np.random.default_rng(nth)
        factors = {}
        for name, module in modules.modules_of(config).items():
            shapes = (RANK, module.shape[1]), (module.shape[0], RANK)
            down, up = (0.02 * generator.standard_normal(x, np.float32) for x in shapes)
            factors[name] = down, up
        directory = folder / f"adapter-{nth}"
        directory.mkdir()
        peft_directory.write(directory, factors, model, RANK)


def _measured(model: str, folder: Path) -> Row:
    from inference.engine import Engine
    from inference.request import SamplingParams

    engine = Engine.from_model(
        model, weights="bfloat16", max_seqs=REQUESTS, max_context=1024, slots=ADAPTERS, rank=RANK
    )
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        engine.adapters.load(name, folder / name)
    engine.warm_up()

    def seconds(count: int, length: int, new: int) -> float:
        params = [
            SamplingParams(max_new_tokens=new, ignore_eos=True, adapter=names[nth % len(names)])
            for nth in range(count)
        ]
        prompts = [[random.randint(100, 40_000) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - start

    seconds(REQUESTS, PROMPT, 4)
    output_s = statistics.median(seconds(REQUESTS, PROMPT, NEW) for _ in range(3))
    prefill_s = statistics.median(seconds(4, PREFILL, 1) for _ in range(3))
    return {"output_tok_s": REQUESTS * NEW / output_s, "prefill_tok_s": 4 * PREFILL / prefill_s}


def _page(options: argparse.Namespace, rows: list[dict[str, Row]]) -> list[str]:
    """Formats medians, every run, and ratios."""
    lines = []
    for key, name in NAMES.items():
        sides = [[row[side][key] for row in rows] for side in ("engine", "peer")]
        medians = [statistics.median(side) for side in sides]
        cells = [
            f"{median:.1f} ({', '.join(f'{figure:.1f}' for figure in side)})"
            for median, side in zip(medians, sides, strict=True)
        ]
        lines.append((name, *cells, f"{medians[0] / medians[1]:.2f}"))
    return [
        "# Adapters beside vLLM's",
        *prose(
            f"{datetime.date.today()}, {processor()}, Python {platform.python_version()}; both "
            f"engines compute on all of these cores. {options.turns} runs of each by turns, the "
            f"first one not counted. {ADAPTERS} adapters of rank {RANK} on all matrices, which "
            f"requests take in turn: {REQUESTS} prompts of {PROMPT} random tokens, {NEW} new ones, "
            f"greedy; prefill of four prompts of {PREFILL}. `{Path(options.model).name}`, "
            f"bfloat16; {rows[0]['peer']['settings']}{libraries(options.preload)}. Written by "
            "`scripts.reports.peers.adapters`."
        ),
        *table(("median (each run)", "Ridgeline", "vLLM", "ratio"), lines),
    ]


if __name__ == "__main__":
    main()
