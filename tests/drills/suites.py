"""The suite where `assert` does nothing, and as a user who may not write to the checkout."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.drills.harness import Drill, Outcome, Setting, Skipped
from tests.drills.server_process import ROOT

_USER = "1000"
_PARTS = ("tests/configs", "tests/scripts/test_common.py", "tests/inference/kv_pages",
          "tests/inference/scheduling")  # fmt: skip
_LIMIT_S = 3000
_MOST_SHOWN = 20_000  # characters of what failed


def _pytest(setting: Setting, *more: str) -> list[str]:
    parts = _PARTS if setting.quick else ()
    options = "-q", "-p", "no:cacheprovider", "-n", "2", "--dist=loadfile"
    return [sys.executable, "-m", "pytest", *options, *more, *parts]


def optimized(setting: Setting) -> Outcome:
    """The suite under PYTHONOPTIMIZE=1: pytest keeps the asserts of tests alone."""
    return _ran(_pytest(setting), os.environ | {"PYTHONOPTIMIZE": "1"})


def unprivileged(setting: Setting) -> Outcome:
    """The suite by a user who is not root, on a checkout that is mounted to be read only."""
    unshare = shutil.which("unshare")
    if unshare is None:
        raise Skipped("there is no unshare")
    folder = setting.folder
    command = shlex.join(_pytest(setting, f"--basetemp={folder / 'tests'}"))
    script = (
        f"mount --bind {shlex.quote(str(ROOT))} {shlex.quote(str(ROOT))} && "
        f"mount -o remount,bind,ro {shlex.quote(str(ROOT))} && cd {shlex.quote(str(ROOT))} && "
        f"exec {unshare} --user --map-user={_USER} --map-group={_USER} {command}"
    )
    new_names = [unshare, "--mount"] if not os.geteuid() else [unshare, "--mount", "-r"]
    ran = subprocess.run([*new_names, "true"], capture_output=True, text=True)
    if ran.returncode:
        raise Skipped(f"no mount of its own: {ran.stderr.strip()[:100]}")
    environment = os.environ | {
        "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "RIDGELINE_CACHE": _cache(folder),
    }  # fmt: skip
    return _ran([*new_names, "sh", "-c", script], environment)


def _cache(folder: Path) -> str:
    """A cache of the user's own, with the kernels that are built already."""
    from inference.files import cache_directory

    target = folder / "cache"
    target.mkdir()
    if (kernels := cache_directory.path() / "kernels").is_dir():
        shutil.copytree(kernels, target / "kernels")
    return str(target)


def _ran(command: list[str], environment: dict[str, str]) -> Outcome:
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = ran.stdout.splitlines() or ran.stderr.splitlines() or [""]
    failed = [line.split(" - ")[0].split()[1] for line in lines if re.match("FAILED |ERROR ", line)]
    if ran.returncode:
        _, _, failures = ran.stdout.partition(" FAILURES ")
        print((failures or ran.stdout)[:_MOST_SHOWN], ran.stderr[-2000:], file=sys.stderr)
    shown = f": {', '.join(failed[:8])}" if failed else ""
    return Outcome(ran.returncode == 0, f"{lines[-1].strip('= ')}{shown}", {"failed": failed})


DRILLS = (
    Drill("suite_optimized", "the suite under PYTHONOPTIMIZE=1: all pass", optimized, _LIMIT_S),
    Drill(
        "suite_unprivileged", "the suite without root on a read-only checkout: all pass",
        unprivileged, _LIMIT_S,
    ),
)  # fmt: skip
