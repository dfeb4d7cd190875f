"""What all drills share: their bars, how they run, and the page of what they gave."""

import contextlib
import dataclasses
import datetime
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inference.files import local_machine
from tests.drills.server_process import ROOT, Server, Servers

START_S = 60.0  # of the first server that a lane shares, whichever drill starts it
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"
TINY_FLAGS = (f"--model={TINY}", "--set=model.dtype=float32")


class Skipped(Exception):  # noqa: N818
    """The machine lacks what a drill needs; says what."""


class TimeIsOver(BaseException):
    """A drill has used its seconds; no handler of a drill's own takes it for a failure."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TimeIsOver` in the main thread, whatever it waits for, after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeIsOver

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a drill gave: whether its bar was reached, and the figures, as text and as numbers."""

    holds: bool
    text: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


class Setting:
    """What drills run with.

    Attributes:
        quick: fewer requests, trials and seconds.
        minutes: of the soak.
        tokens: of an answer of the drills with a real model.
        folder: an empty directory of this drill.
        servers: of the real model; drills of one lane share the one that runs.
        dice: seeded, the same in each run.
    """

    def __init__(
        self, servers: Servers, quick: bool, minutes: float, tokens: int, folder: Path = Path()
    ):
        self.servers, self.quick, self.minutes, self.tokens = servers, quick, minutes, tokens
        self.folder = folder
        self.dice = random.Random(0)

    def size(self, whole: int, quick: int) -> int:
        """One number of a whole run, another of a quick one."""
        return quick if self.quick else whole


@dataclasses.dataclass(frozen=True)
class Drill:
    """One drill.

    Attributes:
        bar: what has to hold, as the page says it.
        limit_s: seconds that it may take, of a long one in addition to its minutes. What earlier
            drills leave of theirs is added.
        is_timed: its bar is a time, so nothing runs beside it.
        is_long: it takes as long as all others that may run beside it.
    """

    name: str
    bar: str
    run: Callable[[Setting], Outcome]
    limit_s: float
    is_timed: bool = False
    is_long: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A drill that has run; `outcome` is None where it was skipped, for the reason in `text`."""

    drill: Drill
    outcome: Outcome | None
    text: str
    seconds: float

    @property
    def mark(self) -> str:
        """One word."""
        if self.outcome is None:
            return "skipped"
        return "holds" if self.outcome.holds else "FAILS"


class Harness:
    """Runs drills: first those that are timed, alone, then a long one beside all others. Each is
    stopped when its time is over, and has failed.
    """

    def __init__(self, flags: Sequence[str], quick: bool, minutes: float, tokens: int):
        """`flags`: of `scripts.serve`, for the drills with a real model."""
        self._flags = list(flags)
        self._sizes = quick, minutes, tokens
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._start = time.monotonic()

    def run(self, drills: Sequence[Drill]) -> list[Row]:
        """Runs drills and prints a line of each; returns what they gave, in the order given."""
        alone = [drill for drill in drills if drill.is_timed]
        long = [drill for drill in drills if drill.is_long]
        others = [drill for drill in drills if not (drill.is_timed or drill.is_long)]
        self._lane(alone, Servers(self._flags), limited)
        servers = Servers(self._flags)
        unlimited = contextlib.nullcontext  # no signal reaches another thread
        beside = threading.Thread(target=self._lane, args=(long, servers, unlimited), daemon=True)
        deadline = time.monotonic() + START_S + sum(map(self._limit_s, long))
        beside.start()
        try:
            self._lane(others, Servers(self._flags), limited)
            beside.join(max(0, deadline - time.monotonic()))
        finally:
            servers.close()
        with self._lock:
            rows = {row.drill.name: row for row in self._rows}
        for drill in long:
            if drill.name not in rows:
                row = rows[drill.name] = self._stopped(drill, self._limit_s(drill))
                self._say(f"{drill.name} {row.mark}: {row.text}")
        return [rows[drill.name] for drill in drills]

    def _limit_s(self, drill: Drill) -> float:
        _, minutes, _ = self._sizes
        return drill.limit_s + (60 * minutes if drill.is_long else 0)

    def _lane(
        self,
        drills: Sequence[Drill],
        servers: Servers,
        limit: Callable[[float], contextlib.AbstractContextManager[None]],
    ) -> None:
        deadline = time.monotonic() + START_S
        with contextlib.closing(servers):
            for drill in drills:
                self._say(f"{drill.name} begins: {drill.bar}")
                start = time.monotonic()
                deadline += self._limit_s(drill)
                try:
                    with limit(deadline - start):
                        outcome, text = self._outcome(drill, servers)
                    row = Row(drill, outcome, text, time.monotonic() - start)
                except TimeIsOver:
                    servers.close()
                    row = self._stopped(drill, time.monotonic() - start)
                with self._lock:
                    self._rows.append(row)
                self._say(f"{drill.name} {row.mark} after {row.seconds:.0f} s: {row.text}")

    def _stopped(self, drill: Drill, seconds: float) -> Row:
        text = f"stopped: its time is over (limit {self._limit_s(drill):.0f} s)"
        return Row(drill, Outcome(False, text), text, seconds)

    def _outcome(self, drill: Drill, servers: Servers) -> tuple[Outcome | None, str]:
        with tempfile.TemporaryDirectory(prefix=f"drill-{drill.name}-") as folder:
            try:
                outcome = drill.run(Setting(servers, *self._sizes, Path(folder)))
            except Skipped as reason:
                return None, str(reason)
            except Exception as error:  # a drill that breaks down has not held
                traceback.print_exc()
                servers.close()
                text = f"broke down: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                return Outcome(False, text), text
        return outcome, outcome.text

    def _say(self, line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        with self._lock:
            print(f"{minutes:02d}:{seconds:02d} {line}", flush=True)


@contextlib.contextmanager
def tiny_server(flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server of a tiny model with 8 slots."""
    with contextlib.closing(Servers([*TINY_FLAGS, "--max_num_seqs=8"])) as servers:
        yield servers.get(flags)


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    return f"{local_machine.name()}, Python {platform.python_version()}"


def commit() -> str:
    """The short name of the commit that is checked out; says where files differ from it."""

    def git(*words: str) -> str:
        ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return ran.stdout.strip()

    name = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{name} with changes" if git("status", "--porcelain", "--", "*.py") else name


def page(rows: Sequence[Row], seconds: float) -> str:
    """The page of a run, in Markdown."""
    num_run = sum(row.outcome is not None for row in rows)
    num_holding = sum(row.mark == "holds" for row in rows)
    command = shlex.join(["python", "-m", "tests.drills", *sys.argv[1:]])
    lines = [
        "# Drills",
        "",
        f"{datetime.date.today()}, commit {commit()}, {machine()}; {num_holding} of {num_run} "
        f"drills hold, in {seconds / 60:.0f} minutes.",
        f"Written by `{command}`; [reliability.md](../reliability.md) says what they are.",
        "",
        "| drill | | bar | figure | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mark = "**FAILS**" if row.mark == "FAILS" else row.mark
        cells = row.drill.name, mark, row.drill.bar, row.text, f"{row.seconds:.0f}"
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
