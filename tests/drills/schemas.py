"""Requests that schemathesis makes of the server's own /openapi.json."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.drills import harness
from tests.drills.harness import Drill, Outcome, Setting, Skipped
from tests.drills.server_process import ROOT

_LEAST_CASES = 3000


def _program() -> str:
    """The program, of `make drills`' environment, of SCHEMATHESIS or of the path."""
    installed = ROOT / ".venv-drills" / "bin" / "schemathesis"
    named = os.environ.get("SCHEMATHESIS") or (str(installed) if installed.exists() else None)
    program = named or shutil.which("schemathesis")
    if program is None:
        raise Skipped("schemathesis is not installed (make .venv-drills/.ready)")
    return program


def of_openapi(setting: Setting) -> Outcome:
    """Thousands of generated requests, of each operation: no answer is a server's error."""
    program, examples = _program(), setting.size(60, 4)
    report = setting.folder / "report.json"
    with harness.tiny_server() as server:
        engine = server.engine
        command = [
            program, "run", f"http://127.0.0.1:{server.port}/openapi.json", "--seed=1",
            "--checks=not_a_server_error", "--phases=examples,coverage,fuzzing", "--no-shrink",
            f"--max-examples={examples}", "--workers=2", "--continue-on-failure", "--report=json",
            f"--report-json-path={report}", "--request-timeout=60", "--suppress-health-check=all",
        ]  # fmt: skip
        if setting.quick:
            command += ["--include-path=/v1/completions", "--include-path=/detokenize"]
        ran = subprocess.run(command, cwd=setting.folder, capture_output=True, text=True)
        is_same = server.engine == engine
    if ran.returncode:
        print(ran.stdout[-6000:], ran.stderr[-2000:], file=sys.stderr)  # with commands of curl
    return judged(report, ran.returncode, setting.size(_LEAST_CASES, 1), is_same)


def judged(report: Path, status: int, least: int, is_same: bool) -> Outcome:
    """What a report of schemathesis says; `is_same`: the engine has not been started again."""
    if not report.exists():
        return Outcome(False, f"schemathesis ended with status {status} and wrote no report")
    results = json.loads(report.read_text("utf-8"))
    cases = results["test_cases"]
    num, num_bad = cases["generated"], cases["with_failures"] + cases["errored"]
    where = "; ".join(
        f"{', '.join(failure['operations'])}: {failure['title']}" for failure in results["failures"]
    )
    return Outcome(
        status == 0 and num >= least and not num_bad and is_same,
        f"{num} cases of {results['operations']['tested']} operations, {num_bad} answers of 5xx"
        + (f" ({where})" if where else "")
        + ("" if is_same else ", the engine was started again"),
        {"cases": cases},
    )


DRILLS = (
    Drill(
        "schemathesis", ">= 3,000 cases against /openapi.json: 0 answers of 5xx", of_openapi,
        limit_s=165,
    ),
)  # fmt: skip
