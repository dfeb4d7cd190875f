"""How every app ends: its exit status, and what it says on the way out."""

import os
import subprocess
import sys
import threading
import types

import jax
import pytest
from absl import flags

from configs.engine import Config
from configs.errors import InputError
from configs.runs import smollm2_laptop
from inference.engine import Engine
from inference.planner.calibration import lookup, on_device
from layers.kernels import device
from scripts import common, failures, prune, quantize, train
from scripts.flags import speculation_flags
from tests import compiling, fakes
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd):
    def call(main, *args):
        return apps.call(
            types.SimpleNamespace(main=main, __name__="app"), monkeypatch, capfd, *args
        )

    return call


def test_one_process_can_load_every_app():
    """No two define a flag of one name."""
    names = sorted(path.stem for path in (apps.ROOT / "scripts").glob("*.py"))
    code = f"import importlib\nfor name in {names}: importlib.import_module('scripts.' + name)"
    subprocess.run([sys.executable, "-c", code], cwd=apps.ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", ["loaded"]), ("gpu", [("bfloat16",), "loaded"])]
)
def test_an_accelerator_is_measured_before_its_memory_is_taken(platform, expected, monkeypatch):
    order = []
    monkeypatch.setattr(device, "target_device", lambda: device.Device(platform, "a chip", 1))
    monkeypatch.setattr(lookup, "this_machine", lambda *dtypes, **more: order.append(dtypes))
    monkeypatch.setattr(Engine, "from_checkpoint", lambda *args: order.append("loaded"))
    flags.FLAGS.mark_as_parsed()
    common.load_engine(object(), Config(fakes.llama("bfloat16")))
    assert order == expected


@pytest.mark.parametrize("asked, expected", [
    ("ngram", (None, False, "coupled")), ("suffix,k=6", (6, False, "coupled")),
    ("medusa,k=auto", (None, False, "coupled")),
    ("eagle,tree=16,typical", (16, True, "typical")), ("mtp,tree=8", (8, True, "coupled")),
    ("eagle:DIR,rejection,k=4", (4, False, "rejection")),
    *((f"eagle,{options}", None) for options in (
        "tree=16,k=4", "tree=16,k=auto", "k=4,k=4", "rejection,typical", "tree=32", "k=0", "trees=4"
    )),
    ("ngram,tree=4", None),
])  # fmt: skip
def test_what_drafts_has_one_size_and_one_rule(asked, expected, monkeypatch):
    monkeypatch.setattr(speculation_flags, "SPECULATE", types.SimpleNamespace(value=asked))
    if expected is not None:
        assert speculation_flags._parsed()[2:] == expected
        return
    with pytest.raises(
        InputError, match="takes one of k=auto and .*, and one of .*, not '"
    ) as error:
        speculation_flags._parsed()
    assert asked.partition(",")[2] in str(error.value) and "\n" not in str(error.value)


def test_rates_are_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(on_device, "seconds", lambda *args, **options: measured.append(1) or 1.0)
    for _ in range(2):
        assert on_device.copy_bandwidth(1 << 14) > 0 and on_device.matmul_rate("float32", 32) > 0
    assert len(measured) == 2


def test_flags_are_checked_before_jax_is_loaded():
    code = (
        "import sys\nfrom scripts import chat, convert, evaluate, generate, plan\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=apps.ROOT, check=True, timeout=60)


def of_a_library_cut():
    """As an app says it: the library's reason comes behind what else it says."""
    try:
        try:
            raise RuntimeError(f"RESOURCE_EXHAUSTED: {'x' * 500} No space left on device")
        except RuntimeError as error:
            raise InputError(f"cannot write: {str(error)[:30]}") from None
    except InputError as error:
        return error


FAILURES = {
    "file": (OSError(2, "No such file", "/x"), "error: No such file: /x"),
    "disk": (OSError(28, "No space left on device"), "left on device; free some there, or write"),
    "disk of a library": (RuntimeError("tensorstore: No space left on device [x]"), "; free some"),
    "disk of a library, cut": (of_a_library_cut(), "xxx; free some there, or write elsewhere"),
    "files": (OSError(24, "Too many open files"), "open files; raise the limit on open files"),
    "read-only": (OSError(30, "Read-only file system", "/x"), "system: /x; write elsewhere"),
    "memory": (MemoryError(), "error: out of memory; raise the limit of this process"),
    "fault": (KeyError("x"), "error: a fault of this program, KeyError: 'x' (" + __file__),
    "terminal": (InputError("a \x1b[31m \0 b"), r"error: a \x1b[31m \x00 b"),
    "device": (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\n" + "detail\n" * 9999),
        "error: RESOURCE_EXHAUSTED: Out of memory detail",
    ),
    "interrupt": (KeyboardInterrupt(), "interrupted"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_line(run, case):
    error, message = FAILURES[case]

    def main(argv):
        raise error

    ran = run(main)
    assert ran.status == 1 and message in ran.error and len(ran.err) < 700


def test_what_to_do_is_said_of_the_cause_of_a_refusal(run):
    def main(argv):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise InputError("cannot write x") from None

    assert "cannot write x; free some there, or write elsewhere (--output" in run(main).error


def test_too_little_memory_for_jax_is_said_before_it_is_loaded(run, monkeypatch):
    monkeypatch.setattr(failures.resource, "getrlimit", lambda kind: (900 << 20, -1))
    assert "may have 900 MiB of addresses (ulimit -v)" in run(lambda argv: None).error


def test_a_failure_in_detail(run):
    def main(argv):
        raise RuntimeError("where is it?")

    with pytest.raises(RuntimeError, match="where is it"):
        run(main, "--verbosity=1")
    assert "where is it?" in run(main).error


def test_a_long_compilation_says_how_far_it_is(monkeypatch, capsys):
    """Again and again, and nothing where none is long."""
    executables = types.SimpleNamespace(shapes=["a", "b"], num_requested=3)
    runner = types.SimpleNamespace(executables=executables)
    engine = types.SimpleNamespace(is_compiling=True, model_runner=runner)
    lines: list[str] = []
    has_said = threading.Event()

    def say(line):
        lines.append(line)
        executables.shapes.append("c")
        if len(lines) == 2:
            has_said.set()

    monkeypatch.setattr(common, "say", say)
    for name in ("_COMPILE_SILENCE_S", "_COMPILE_EVERY_S", "_COMPILE_POLL_S"):
        monkeypatch.setattr(common, name, 1e-3)
    with common.compile_progress(engine, 18):
        assert has_said.wait(60)
    assert lines[:2] == ["compiling 3 of 18 steps", "compiling 4 of 18 steps"]
    lines.clear(), has_said.clear()
    with common.compile_progress(engine):
        assert has_said.wait(60)
    assert lines[0] == "compiling 3 of 3 steps"
    monkeypatch.setattr(common, "_COMPILE_SILENCE_S", 1e9)
    lines.clear()
    with common.compile_progress(engine):
        pass
    monkeypatch.setattr(common, "_COMPILE_SILENCE_S", 1e-3)
    engine.is_compiling = False
    with common.compile_progress(engine) as compiling:
        compiling.set()
        engine.is_compiling = True
    assert not lines


def test_runs_by_name_and_by_path(monkeypatch, tmp_path):
    folder = apps.ROOT / "configs" / "runs"
    monkeypatch.chdir(tmp_path)
    for path in ("smollm2_laptop", folder / "smollm2_laptop.py", folder / ".." / "runs" /
                 "smollm2_laptop.py", os.path.relpath(folder / "smollm2_laptop.py")):  # fmt: skip
        assert common._load_run(str(path)) is smollm2_laptop.RUN


def test_help_is_no_failure(tmp_path):
    ran = apps.start("evaluate", "--help", cache=tmp_path)
    assert ran.status == 0 and "--window" in ran.out and ran.err == ""


def test_a_reader_that_has_left_is_no_traceback(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.evaluate", "--help"], cwd=apps.ROOT, stdout=writing,
        stderr=subprocess.PIPE, timeout=120,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("flag", ["--help", "--window=16"])
def test_output_that_cannot_be_written_is_one_line(tmp_path, flag):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.evaluate", f"--model={apps.TINY}", "--max_tokens=8",
             flag, "--set=engine.shapes.prefill_chunks=(1,)"],
            cwd=apps.ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, text=True,
            env=compiling.environment(tmp_path),
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]


def test_a_character_the_terminal_lacks_ends_nothing(tmp_path):
    program = "from scripts import common; common.run(lambda argv: print('a \u2581 b'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=apps.ROOT, capture_output=True, timeout=120,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "RIDGELINE_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"a \\u2581 b\n"), done.stderr


@pytest.mark.parametrize("app", [prune, quantize, train])
def test_what_an_app_does_not_read_is_not_defined_by_another(app):
    """Whose flags are there when both are loaded, as here, and not where it runs alone."""
    for name in app.UNREAD:
        found = flags.FLAGS.find_module_defining_flag(name)
        assert found == "scripts.common" or found.startswith("scripts.flags."), (name, found)
