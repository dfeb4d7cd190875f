"""Programs that run one after another, each within a time of its own; what became of each.

Each is a process: one that breaks the device's context, or hangs, takes nothing along.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_TAIL = 3000  # characters of a program's output that are kept
_LEAST_S = 5.0  # less is not worth a start


@dataclasses.dataclass(frozen=True)
class Program:
    """A command and its limit in seconds.

    Attributes:
        is_json: it prints JSON, a value a line; the last whole one is its result, also when it was
            ended.
        missing: what it needs and is not there; None: nothing.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_json: bool = False
    missing: str | None = None


@dataclasses.dataclass
class Outcome:
    """What became of a program.

    Attributes:
        status: 'done', 'failed', 'out of time' or 'not run'.
        seconds: that it took.
        result: the last value that it printed; None where it printed no JSON.
        tail: the end of what it printed, where `result` does not hold it or it failed.
    """

    name: str
    command: Sequence[str]
    status: str
    seconds: float = 0.0
    result: Any = None
    tail: str = ""


def run(
    programs: Iterable[Program], budget_s: float, folder: Path, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Runs them in a folder, and yields each one's outcome when it has ended.

    Args:
        programs: asked for one at a time, after the outcome of the one before.
        budget_s: for all of them together: whoever comes last may have less than its own limit.
        folder: the working directory.
        environment: added to this process's own.
    """
    deadline = time.monotonic() + budget_s
    for program in programs:
        limit_s = min(program.limit_s, deadline - time.monotonic())
        if program.missing is not None:
            yield Outcome(program.name, program.command, "not run", tail=program.missing)
        elif limit_s < _LEAST_S:
            yield Outcome(program.name, program.command, "not run", tail="no time is left")
        else:
            yield _run(program, limit_s, folder, os.environ | dict(environment))


def _run(program: Program, limit_s: float, folder: Path, environment: dict[str, str]) -> Outcome:
    start = time.monotonic()
    # Files, not pipes: whoever outlives the program cannot hold us up.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            program.command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            status = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
        printed, said = (_read(file) for file in (out, err))
    outcome = Outcome(program.name, program.command, status, time.monotonic() - start)
    if program.is_json:
        outcome.result = _last_value(printed)
        if outcome.result is None and status == "done":
            outcome.status = "failed"
    if outcome.result is None or status != "done":
        outcome.tail = (said if outcome.result else f"{printed}\n{said}").strip()[-_TAIL:]
    return outcome


def _last_value(printed: str) -> Any:
    """The last line that is JSON; None without one."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
