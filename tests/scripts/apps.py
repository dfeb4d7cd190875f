"""Runs an app inside this process or as its own, and says what became of it."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from absl.testing import flagsaver

from inference.planner.calibration import measure
from inference.runtime import compilation_cache
from scripts import common
from tests import compiling

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a refusal."""
        assert self.status in (1, 2), self
        assert self.out == "" and self.err.count("\n") == 1, self
        assert self.err.startswith("error: ") and "Traceback" not in self.err, self
        return self.err


def call(module, monkeypatch, capfd, *args: str) -> Ran:
    """The app's main under its own exit statuses, without the cost of a start and of measuring the
    machine.
    """
    # A cache of compiled programs would outlive the test in this process.
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e11)
    monkeypatch.setattr(sys, "argv", [module.__name__, *args])
    capfd.readouterr()
    with flagsaver.flagsaver():
        try:
            common.run(module.main, getattr(module, "UNREAD", ()))
        except SystemExit as end:
            status = end.code or 0
    return Ran(int(status), *capfd.readouterr())


def start(name: str, *args: str | bytes, cache: Path, **environment: str) -> Ran:
    """`python -m scripts.NAME`, its caches in a folder of their own."""
    command = [sys.executable, "-m", f"scripts.{name}", *args]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=240,
        env=compiling.environment(cache, **environment),
    )  # fmt: skip
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
