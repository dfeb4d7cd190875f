"""Two commands that run by turns on one machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from inference.files import local_machine
from scripts.reports.pages.results import Row

ROOT = Path(__file__).resolve().parents[3]
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")

Load = Callable[[int], Row]  # of a seed


def alternate(
    sides: Mapping[str, Load], turns: int, seeds: Callable[[int], int]
) -> list[dict[str, Row]]:
    """Runs all sides in every turn, in reverse order in every other one.

    Args:
        sides: functions of a seed.
        turns: how many; one more runs first and is not counted.
        seeds: returns a turn's seed.
    """
    rows = []
    for turn in range(turns + 1):
        order = list(sides)[:: -1 if turn % 2 else 1]
        figures = {side: sides[side](seeds(turn)) for side in order}
        if turn:
            rows.append({side: figures[side] for side in sides})
    return rows


def printed(command: list[str], environment: Mapping[str, str] | None = None) -> Row:
    """Returns the JSON object that a command prints on its last line."""
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | (environment or {}), stdout=subprocess.PIPE, text=True
    )
    if run.returncode:
        sys.exit(f"{' '.join(command)} ended with status {run.returncode}")
    output: Row = json.loads(run.stdout.strip().splitlines()[-1])
    return output


def processor() -> str:
    """Names the processor, the cores that this process may use, and their instruction sets."""
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if "flags" in line),
        "",
    ).split()
    present = ", ".join(name for name in _INSTRUCTION_SETS if name in flags)
    return f"{local_machine.name()} ({present})"


def libraries(preload: str) -> str:
    """Names preloaded libraries: ', preloaded A, B', or ''."""
    names = [Path(path).name for path in preload.split(":") if path]
    return f", preloaded {', '.join(names)}" if names else ""
