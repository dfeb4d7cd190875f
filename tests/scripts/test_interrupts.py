"""Ctrl-C and SIGTERM: one line and status 1, wherever they land."""

import json
import random
import signal
import subprocess
import sys
import time
import types

import pytest

from scripts import interrupts
from tests import compiling
from tests.scripts import apps

_SETTINGS = (f"--model={apps.TINY}", "--max_new_tokens=200", "--ignore_eos")
_AT_AN_IMPORT = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == os.environ["INTERRUPTED_AT"]:
        os.kill(os.getpid(), signal.Signals[os.environ["INTERRUPTED_BY"]])

sys.addaudithook(interrupt)
"""
_SAYS_THAT_IT_RUNS = """
import os, sys

class Watched:
    def find_spec(name, path=None, target=None):
        if name == "absl":  # what an app imports once it listens to interrupts
            open(os.environ["RUNS"], "w").close()

sys.meta_path.insert(0, Watched)
"""


@pytest.mark.parametrize(
    "app, module, name",
    [("plan", "absl.flags", "SIGTERM"), ("bench", "jax", "SIGINT"),
     ("generate", "jax._src.compiler", "SIGTERM"), ("generate", "inference.engine", "SIGINT")],
)  # fmt: skip
def test_while_an_app_starts(app, module, name, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_AT_AN_IMPORT)
    flags = [*_SETTINGS, "--prompt=A"] if app == "generate" else []
    more = {"PYTHONPATH": str(tmp_path), "INTERRUPTED_AT": module, "INTERRUPTED_BY": name}
    ran = apps.start(app, *flags, cache=tmp_path / "cache", **more)
    assert (ran.status, ran.out, ran.err) == (1, "", "error: interrupted\n")


@pytest.mark.parametrize("starts", [1, pytest.param(40, marks=pytest.mark.long)])
def test_at_any_moment(starts, tmp_path):
    """Of the first seconds, but for Python's own start."""
    source = tmp_path / "in.jsonl"
    source.write_text(f"{json.dumps({'prompt': 'A'})}\n" * 2000)
    (tmp_path / "sitecustomize.py").write_text(_SAYS_THAT_IT_RUNS)
    moments, runs = random.Random(starts), tmp_path / "runs"
    for _ in range(starts):
        runs.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.generate", *_SETTINGS, f"--input={source}"],
            cwd=apps.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=compiling.environment(
                tmp_path / "cache", PYTHONPATH=str(tmp_path), RUNS=str(runs)
            ),
        )  # fmt: skip
        while not runs.exists():
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 2.5))
        process.send_signal(moments.choice([signal.SIGINT, signal.SIGTERM]))
        out, err = process.communicate(timeout=60)
        said = [
            line
            for line in err.splitlines()
            if not line.startswith(("llama-tokenizer, ", "compiling "))
        ]
        assert (process.returncode, out, said) == (1, "", ["error: interrupted"])


@pytest.fixture
def installed():
    before = {n: signal.signal(n, interrupts._on_signal) for n in interrupts._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert sys.gettrace() is None


def function_of(module: str):
    """One that is interrupted, and loses what is raised in it."""

    def call():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return "lost"
        return "finished"

    return types.FunctionType(
        call.__code__, {"__name__": module, "signal": signal, "__builtins__": __builtins__}
    )


@pytest.mark.parametrize(
    "module",
    ["jax._src.callback", "jaxlib.weakref", "importlib._bootstrap", "inference.scheduling.queue"],
)
def test_jax_imports_and_the_scheduler_finish_first(installed, module):
    found = []

    def call():
        found.append(function_of(module)())
        found.append("went on")

    with interrupts.caught(), pytest.raises(KeyboardInterrupt):
        call()
    assert found == ["finished"]
    with interrupts.caught(), pytest.raises(KeyboardInterrupt):  # where the call is the last
        (lambda: function_of(module)())()


def test_elsewhere_it_is_raised_at_once(installed):
    with interrupts.caught():
        assert function_of("urllib.request")() == "lost"


def test_the_second_does_not_wait(installed, monkeypatch):
    def end():
        raise SystemExit(1)

    def call():
        twice = function_of("jax.numpy")
        twice()

    monkeypatch.setattr(interrupts, "end", end)
    monkeypatch.setattr(interrupts, "_is_waiting", True)
    with interrupts.caught(), pytest.raises(SystemExit):
        call()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_app_chooses_its_moment(installed, number):
    other = ({signal.SIGINT, signal.SIGTERM} - {number}).pop()
    with interrupts.caught(), interrupts.Deferred() as interrupt:
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):  # the second does not wait
            signal.raise_signal(other)
    assert signal.getsignal(number) is signal.getsignal(other) is interrupts._on_signal


def test_status_0_where_stderr_is_closed(tmp_path):
    ran = subprocess.run(
        f"exec {sys.executable} -m scripts.plan --help 2>&-", shell=True, cwd=apps.ROOT,
        stdout=subprocess.PIPE, env=compiling.environment(tmp_path),
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout
