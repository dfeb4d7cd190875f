"""How soon a new process has its first token: compiling, from the cache, or from a file.

    PYTHONPATH=. python docs/compare_starts.py [--model=smollm2-135m] [--runs=3]

Serializes the steps of one sequence for this machine, then starts `scripts.generate` by turns with
an empty cache of executables, with the one that this start has filled, and with `--executables`.
One line each: medians of the first token's seconds and of the process's own processor seconds.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from inference.files import cache_directory

_SETTINGS = ("--set=engine.max_seqs=1", "--set=engine.max_context=512",
             "--set=engine.cache.cache_bytes=33554432",
             "--set=engine.shapes.prefill_chunks=(1,)")  # fmt: skip
_KINDS = ("compiled", "cache", "file")


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    own, took = cache_directory.path(), {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory() as folder:
        cache, files = Path(folder) / "cache", Path(folder) / "executables"
        cache.mkdir()
        for path in own.iterdir():
            if path.name != "compiled":  # weights and the native library are there
                (cache / path.name).symlink_to(path)
        common = (f"--model={given.model}", *_SETTINGS)
        run("compile", *common, "--target=cpu", f"--serialize={files}", cache=cache)
        for _ in range(given.runs):
            shutil.rmtree(cache / "compiled", ignore_errors=True)
            for kind in _KINDS:
                loads = [f"--executables={files}"] * (kind == "file")
                took[kind].append(first_token(common, loads, cache))
    for kind, runs in took.items():
        seconds, processor = map(statistics.median, zip(*runs, strict=True))
        print(f"{kind}: first token after {seconds:.2f} s, {processor:.2f} s of processor time")


def first_token(common: tuple[str, ...], loads: list[str], cache: Path) -> tuple[float, float]:
    """Seconds from the request to its first token, and processor seconds of the whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = run("generate", *common, *loads, "--prompt=Once upon a time", "--max_new_tokens=2",
              "--json", cache=cache)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return json.loads(out)["stats"]["ttft_s"], spent


def run(app: str, *flags: str, cache: Path) -> str:
    """What an app prints, in a process of its own."""
    command = [sys.executable, "-m", f"scripts.{app}", *flags]
    environment = os.environ | {"RIDGELINE_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


if __name__ == "__main__":
    main()
