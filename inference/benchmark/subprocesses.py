"""Commands that run one after another, each in a process and within a time of its own.

One that breaks the device's context, or hangs, does no harm to the others.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_TAIL = 3000  # characters of a command's output that are kept
_LEAST_S = 5.0  # less is not worth starting a process for


@dataclasses.dataclass(frozen=True)
class Subprocess:
    """A command and its limit in seconds.

    Attributes:
        is_json: whether it prints JSON, a value a line; the last whole one is its result, even if
            it was ended early.
        missing: what it needs and lacks; None if it can run.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_json: bool = False
    missing: str | None = None


@dataclasses.dataclass
class Outcome:
    """How a subprocess ended.

    Attributes:
        status: 'done', 'failed', 'out of time' or 'not run'.
        seconds: it took.
        result: the last value that it printed; None where it printed no JSON.
        tail: the end of what it printed, where `result` does not hold it or it failed.
        date: the day on which it ended.
        sources: digest of the files that it ran, where a caller compares them.
    """

    name: str
    command: Sequence[str]
    status: str
    seconds: float = 0.0
    result: Any = None
    tail: str = ""
    date: str = dataclasses.field(default_factory=lambda: str(datetime.date.today()))
    sources: str = ""


def run(
    subprocesses: Iterable[Subprocess],
    budget_s: float,
    folder: Path,
    environment: Mapping[str, str],
) -> Iterator[Outcome]:
    """Runs them in a folder, and yields each one's outcome when it has ended.

    Args:
        subprocesses: asked for one at a time, after the outcome of the one before.
        budget_s: for all of them together; the last ones may have less than their own limits.
        folder: the working directory.
        environment: added to this process's own.
    """
    deadline = time.monotonic() + budget_s
    for spec in subprocesses:
        limit_s = min(spec.limit_s, deadline - time.monotonic())
        if spec.missing is not None:
            yield Outcome(spec.name, spec.command, "not run", tail=spec.missing)
        elif limit_s < _LEAST_S:
            yield Outcome(spec.name, spec.command, "not run", tail="no time is left")
        else:
            yield _run(spec, limit_s, folder, os.environ | dict(environment))


def _run(spec: Subprocess, limit_s: float, folder: Path, environment: dict[str, str]) -> Outcome:
    start = time.monotonic()
    # Files, not pipes: a grandchild that lives on cannot hold us up.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            spec.command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            status = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
        printed, errors = (_read(file) for file in (out, err))
    outcome = Outcome(spec.name, spec.command, status, time.monotonic() - start)
    if spec.is_json:
        outcome.result = _last_value(printed)
        if outcome.result is None and status == "done":
            outcome.status = "failed"
    if outcome.result is None or status != "done":
        outcome.tail = (errors if outcome.result else f"{printed}\n{errors}").strip()[-_TAIL:]
    return outcome


def _last_value(printed: str) -> object:
    """The last line that is JSON; None without one."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
