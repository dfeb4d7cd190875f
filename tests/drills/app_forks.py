"""Runs apps as forks of one process that has imported them: a hundred runs a minute.

`run` starts that process. It reads from stdin a list of [cache, NAME, FLAG, ...] as JSON and writes
one of [status, stdout, stderr] each; status is None where a run did not end in time.
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from inference.files import cache_directory

_LIMIT_S = 60.0
_MEMORY = 8 << 30  # of addresses; what reads without end fails by itself
_PRELOADED = ("jax", "inference.engine", "inference.checkpoints.convert", "scripts.common")


def run(
    commands: Sequence[Sequence[str]], folder: Path, caches: Sequence[Path] = ()
) -> list[tuple[int | None, str, str]]:
    """What became of `python -m scripts.NAME FLAGS`, for each (NAME, *FLAGS); a name with dots is
    that of another module. Caches lie in `folder`, or each in one of `caches`.
    """
    places = caches or [folder / "cache"] * len(commands)
    listed = [[str(cache), *command] for cache, command in zip(places, commands, strict=True)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.drills.app_forks"], cwd=root, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(folder),
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(json.dumps(listed))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the app that it runs
    if process.returncode:
        raise RuntimeError(f"apps cannot be imported: status {process.returncode}")
    return [(status, out, err) for status, out, err in json.loads(out)]


def environment(folder: Path) -> dict[str, str]:
    """Of an app whose caches lie in a folder, but for the CPU's kernels, which are built once."""
    kernels = os.environ.get("RIDGELINE_KERNELS") or str(cache_directory.path() / "kernels")
    places = {"RIDGELINE_CACHE": str(folder / "cache"), "RIDGELINE_KERNELS": kernels}
    return os.environ | places | {"JAX_PLATFORMS": "cpu"}


def main() -> None:
    """Serves one list."""
    commands = json.load(sys.stdin)
    for name in _PRELOADED:
        importlib.import_module(name)
    json.dump([_fork(*command) for command in commands], sys.stdout)


def _fork(cache: str, *command: str) -> tuple[int | None, str, str]:
    pipes = os.memfd_create("stdout"), os.memfd_create("stderr")
    pid = os.fork()
    if not pid:
        try:
            for number, pipe in enumerate(pipes, 1):
                os.dup2(pipe, number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            os.environ["RIDGELINE_CACHE"] = cache
            _app(*command)
        finally:
            os._exit(99)
    status = _wait(pid)
    out, err = (_text(pipe) for pipe in pipes)
    return status, out, err


def _app(name: str, *flags: str) -> None:
    sys.argv = [name, *flags]
    try:
        runpy.run_module(name if "." in name else f"scripts.{name}", run_name="__main__")
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))
    sys.stderr.flush()
    os._exit(0)


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _text(pipe: int) -> str:
    os.lseek(pipe, 0, os.SEEK_SET)
    with os.fdopen(pipe, "rb") as file:
        return file.read(1 << 20).decode(errors="replace")


if __name__ == "__main__":
    main()
