"""The native library found, built, damaged and missing; and an engine with it and without."""

import dataclasses
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from inference.files import digests, local_machine, ownership
from inference.runtime import cpu_kernels
from layers import decoder
from layers.kernels.cpu import build, library
from layers.kernels.linear import packed
from tests import fakes
from tests.layers import native
from tests.layers.native import instruction_set  # noqa: F401

MODEL = fakes.llama("bfloat16")


@pytest.fixture
def whole():
    """The library that this run's engines use."""
    native.need()
    found = build.find(Path(os.environ["RIDGELINE_KERNELS"]))
    assert found is not None
    return found


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """As at the start of a process whose kernels are to lie in an empty folder."""
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setenv("RIDGELINE_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "kernels"


def _load(caplog) -> list[str]:
    """What is said beside a fresh attempt."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cpu_kernels._load.__wrapped__()
    return [record.getMessage() for record in caplog.records]


def _refused(caplog) -> str:
    """The line that says why, after the one that says what takes a while."""
    begun, line = _load(caplog)
    assert "building the CPU kernels" in begun and "\n" not in line
    return line


def test_without_a_compiler_one_line_says_so(unloaded, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(unloaded))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    line = _refused(caplog)
    assert "XLA's run instead: no C++ compiler was found (g++ 12, clang++, or pip" in line
    assert not library.is_loaded() and "\n" not in line


@pytest.mark.parametrize("command", ["false", "no-such-compiler", "a 'quote"])
def test_a_compiler_that_fails_leaves_nothing_but_its_log(unloaded, monkeypatch, caplog, command):
    monkeypatch.setenv("CXX", command)
    line = _refused(caplog)
    assert command in line and "\n" not in line
    assert not library.is_loaded()
    assert {path.name for path in unloaded.glob("*")} <= {"build.log"}


def test_a_compiler_that_takes_too_long_is_given_up(unloaded, monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho still at it >&2\nexec sleep 60\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.5)
    assert f"instead: {compiler} failed" in _refused(caplog)
    log = (unloaded / "build.log").read_text()
    assert "timed out" in log and "still at it" in log


def test_what_an_interrupted_build_left_is_removed(unloaded, monkeypatch, caplog):
    for name in ("building-long-ago", "building-now"):
        (unloaded / name).mkdir(parents=True)
    os.utime(unloaded / "building-long-ago", (1, 1))
    monkeypatch.setenv("CXX", "false")
    _refused(caplog)
    assert {path.name for path in unloaded.glob("*")} == {"building-now", "build.log"}


def test_what_failed_is_not_tried_by_every_process(unloaded, monkeypatch, caplog, tmp_path):
    """Until sources or compiler are others, or a day is over."""
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f"#!/bin/sh\necho >> {calls}\necho too old >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))

    def fails_again() -> bool:
        """Whether it is compiled again; the last line is the same in any case."""
        calls.write_text("")
        *begun, line = _load(caplog)
        assert f"instead: {compiler} failed, see {unloaded / 'build.log'}" in line
        assert bool(begun) == bool(calls.read_text())
        return bool(begun)

    assert fails_again() and "too old" in (unloaded / "build.log").read_text()
    assert not fails_again()
    os.utime(compiler, (1, 1))
    assert fails_again() and not fails_again()
    with monkeypatch.context() as changed:
        changed.setattr(build, "library_name", lambda: "kernels-of-other-sources")
        assert fails_again() and not fails_again()
    assert fails_again()
    os.utime(unloaded / "build.log", (1, 1))
    assert fails_again()
    (unloaded / "build.log").unlink()
    assert fails_again()


def test_a_folder_that_cannot_be_written(unloaded, monkeypatch, caplog):
    unloaded.write_text("a file")
    monkeypatch.setenv("CXX", "false")
    line = _refused(caplog)
    assert str(unloaded) in line and not library.is_loaded()


def test_a_truncated_library_is_not_loaded(whole, unloaded, monkeypatch, caplog):
    """Mapped as it is, it would end the process."""
    unloaded.mkdir()
    copy = unloaded / whole.name
    shutil.copy(whole, copy)
    assert build.find(unloaded) == copy
    copy.write_bytes(whole.read_bytes()[:-1000])
    assert build.find(unloaded) is None
    monkeypatch.setenv("CXX", "false")
    assert _refused(caplog) and not library.is_loaded()


def test_a_library_that_is_built_is_its_owners_alone(tmp_path):
    """Linkers follow the umask, which leaves groups of one user the right to write."""
    linked = tmp_path / "library.so"
    linked.write_bytes(b"linked")
    linked.chmod(0o775)
    ownership.check(build._keep(linked, tmp_path, "kernels"))


def test_another_library_is_refused(whole, unloaded, monkeypatch, caplog):
    other = unloaded / whole.name
    unloaded.mkdir()
    monkeypatch.setattr(build, "find", lambda folder: other)
    shutil.copy(jax.lib.__file__, other)
    (line,) = _load(caplog)
    assert "XLA's run instead" in line and not library.is_loaded()


def test_a_wheel_brings_its_own(whole, unloaded, monkeypatch, tmp_path, caplog):
    """No compiler is asked; one of other sources or damaged is none, and so it is in a folder that
    was named.
    """
    monkeypatch.setattr(build, "BUNDLED", tmp_path / "bundled")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    build.BUNDLED.mkdir()
    content, digest = whole.read_bytes(), whole.stem.rpartition("-")[2]
    own = build.BUNDLED / f"{build._bundled_name(platform.machine())}-{digest}.so"
    own.write_bytes(content)
    for path, mode in ((build.BUNDLED, 0o775), (own, 0o664)):  # as pip installs for umask 002
        path.chmod(mode)
    assert _refused(caplog) and not library.is_loaded()  # RIDGELINE_KERNELS is set
    monkeypatch.delenv("RIDGELINE_KERNELS")
    used = []

    def load(path):
        used.append(path)
        return library.Trials(("avx2",), ())

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(library, "use", lambda name: "")
    assert _load(caplog) == [] and used == [own]
    own.write_bytes(content[:-1])
    assert _load(caplog) and used == [own]
    own.rename(build.BUNDLED / whole.name)
    assert _load(caplog) and used == [own]


def test_a_library_without_a_function_is_refused(whole, unloaded, monkeypatch, caplog):
    """One that somebody built of other sources and put there."""
    unloaded.mkdir()
    content = whole.read_bytes().replace(b"ridgeline_try\0", b"ridgeline_TRY\0")
    older = unloaded / f"{build.library_name()}-{build._digest(content)}.so"
    older.write_bytes(content)
    older.chmod(0o755)
    (line,) = _load(caplog)
    assert "XLA's run instead: not the library" in line and "ridgeline_try" in line
    assert not library.is_loaded()


@pytest.fixture
def start(unloaded, monkeypatch, tmp_path, caplog):
    """(seconds of a product by each instruction set, -1 where it faults) -> what a process computes
    with that starts on such a machine, how many products it times, and what it says.
    """
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))

    def run(**seconds):
        used, timed = [], []
        trials = library.Trials(
            tuple(name for name in seconds if seconds[name] > 0),
            tuple(name for name in seconds if seconds[name] < 0),
        )
        monkeypatch.setattr(build, "find", lambda folder: folder)
        monkeypatch.setattr(ownership, "check", lambda path: None)
        monkeypatch.setattr(library, "load", lambda path: trials)
        monkeypatch.setattr(library, "use", used.append)
        monkeypatch.setattr(
            library, "product_seconds", lambda name: timed.append(name) or seconds[name]
        )
        lines = _load(caplog)
        return used[-1], len(timed), lines

    return run


def test_the_faster_instruction_set_is_timed_once(start):
    """Whatever later starts would measure: a machine's answers keep their bits."""
    assert start(avx512bf16=1e-4, avx512vnni=2e-4, avx512=1e-9) == ("avx512bf16", 10, [])
    assert start(avx512bf16=3e-4, avx512vnni=2e-4) == ("avx512bf16", 0, [])


def test_pairs_at_half_rate_are_left_to_float32(start, monkeypatch):
    assert start(avx512bf16=4e-4, avx512vnni=2e-4) == ("avx512vnni", 10, [])
    assert start(avx512bf16=1e-4, avx512vnni=2e-4) == ("avx512vnni", 0, [])
    monkeypatch.setattr(local_machine, "processor", lambda: "another one")
    assert start(avx512bf16=1e-4, avx512vnni=2e-4) == ("avx512bf16", 10, [])
    assert start(neonbf16=4e-4, neondotprod=2e-4, neon=1e-4) == ("neondotprod", 10, [])


@pytest.mark.parametrize("content", ['"avx512vnni"', '{"instruction_set": 3}', "[", "{}",
                                     '{"instruction_set": "avx2"}'])  # fmt: skip
def test_a_choice_that_makes_no_sense_is_made_again(start, content):
    start(avx512bf16=4e-4, avx512vnni=2e-4)
    path = local_machine.path("products", build.library_name())
    path.write_bytes(digests.sealed(content))
    assert start(avx512bf16=1e-4, avx512vnni=2e-4, avx2=1.0) == ("avx512bf16", 10, [])


def test_a_start_takes_the_choice_that_it_waited_for(start, monkeypatch):
    """Or two at the same moment could compute different bits."""

    def wait(descriptor, operation):
        local_machine.write({"instruction_set": "avx512vnni"}, "products", build.library_name())

    monkeypatch.setattr(local_machine.fcntl, "flock", wait)
    assert start(avx512bf16=1e-4, avx512vnni=2e-4) == ("avx512vnni", 0, [])


def test_a_choice_that_cannot_be_kept_is_made_all_the_same(start, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        used, num_timed, (line,) = start(avx512bf16=1e-4, avx512vnni=2e-4)
        assert (used, num_timed) == ("avx512bf16", 10) and "cannot keep" in line


def test_names_decide_where_none_is_in_doubt(start):
    assert start(amx=2.0, avx512bf16=1.0, avx512vnni=1.0) == ("amx", 0, [])
    assert start(avx512vnni=2.0, avx512=1.0, avx2=1.0) == ("avx512vnni", 0, [])


def test_a_processor_that_claims_what_it_lacks(start):
    """As one does whose hypervisor forbids instructions: one line says what is used instead."""
    used, num_timed, (line,) = start(avx512bf16=-1, avx512vnni=1.0, avx2=1.0)
    assert (used, num_timed) == ("avx512vnni", 0)
    assert "use avx512vnni: this processor claims avx512bf16, whose" in line


def test_none_means_none(unloaded, monkeypatch, caplog):
    monkeypatch.setenv("RIDGELINE_KERNELS", "none")
    assert _load(caplog) == [] and not library.is_loaded()


_PROMPTS = fakes.prompts([70, 3, 33])


def _engine(dtype, name):
    engine = fakes.engine(
        dataclasses.replace(MODEL, dtype=dtype),
        shapes="one",
        draws=False,
        max_seqs=3,
        linear=name,
        attention=name,
    )
    leaves = jax.tree.leaves(engine.model_runner.params, is_leaf=packed.is_packed)
    assert engine.config.engine.kernels.linear == name
    assert any(map(packed.is_packed, leaves)) == (name == "ffi_cpu")
    return engine


def _scores(engine):
    return np.concatenate([score.logprobs for score in engine.score(_PROMPTS)])


def test_float32_gives_the_same_answers(instruction_set):  # noqa: F811
    both = [_engine("float32", name) for name in ("reference", "ffi_cpu")]
    np.testing.assert_allclose(*map(_scores, both), atol=1e-4)
    reference, own = (engine.generate(_PROMPTS, fakes.greedy(12)) for engine in both)
    assert [each.token_ids for each in reference] == [each.token_ids for each in own]


def test_bfloat16_is_no_less_exact(instruction_set):  # noqa: F811
    """Than XLA's products and attention are, against float32."""
    exact = _scores(_engine("float32", "reference"))
    reference, own = (
        np.abs(_scores(_engine("bfloat16", name)) - exact).mean()
        for name in ("reference", "ffi_cpu")
    )
    assert own < 1.1 * reference


def test_padding_is_zero_in_every_layer(monkeypatch):
    """So products leave it out."""
    native.need()
    layers, seen = decoder.layers, []

    def watched(params, config, x_TD, ragged, *args, features=(), **kwargs):
        numbers = tuple(range(1, config.num_layers + 1))
        found = layers(params, config, x_TD, ragged, *args, features=numbers, **kwargs)
        for stream_TD in (x_TD, *found.streams, found.hidden_TD):
            is_used_T = (stream_TD != 0).any(-1)
            jax.debug.callback(lambda *told: seen.append(told), is_used_T, ragged.valid_T)
        return found._replace(streams=())

    monkeypatch.setattr(decoder, "layers", watched)
    fakes.forget_programs()
    engine = fakes.engine(MODEL, max_seqs=8)
    engine.generate(fakes.prompts([70, 3, 33]), fakes.greedy(4))
    fakes.forget_programs()
    for is_used_T, valid_T in seen:
        np.testing.assert_array_equal(is_used_T, valid_T)
    assert not all(valid_T.all() for _, valid_T in seen)


def test_a_tied_table_is_kept_once():
    native.need()
    tied = dataclasses.replace(MODEL, tied=True)
    params = fakes.engine(tied, max_seqs=2).model_runner.params
    assert "head" not in params and packed.is_packed(params["embed"]["table"])
    params = fakes.engine(MODEL, max_seqs=2).model_runner.params
    assert packed.is_packed(params["head"]["table"])
    assert not packed.is_packed(params["embed"]["table"])


def test_weights_that_are_cut_short_while_they_are_mapped(whole, tmp_path):
    code = f"""if True:
        import ctypes, mmap, os
        ctypes.CDLL({str(whole)!r}).ridgeline_name_bus_errors()
        with open({str(tmp_path / "weights")!r}, "w+b") as file:
            file.truncate(1 << 16)
            data = mmap.mmap(file.fileno(), 0)
            file.truncate(0)
            data[1 << 15]
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "a mapped file became shorter" in ran.stderr
