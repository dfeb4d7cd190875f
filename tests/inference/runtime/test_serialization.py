"""Executables in files: the tokens of compiled ones, and files that are not used."""

import dataclasses
import hashlib
import os
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware import targets
from configs.mesh import Mesh
from inference.engine import Engine
from inference.planner.compiled.report import AbsentEngine
from inference.request import SamplingParams
from inference.runtime import batch, compilation_cache
from inference.runtime.serialization import files, key
from inference.runtime.serialization.loaded import LoadedExecutable
from inference.scheduling import step_shapes
from tests import fakes

pytestmark = pytest.mark.quick_code

ENGINE = EngineConfig.of(
    max_seqs=2, max_context=64, cache_bytes=1 << 17, prefill_chunks=(1,), seed=1
)
CONFIG = Config(fakes.llama(num_layers=1), ENGINE)
DRAWN = SamplingParams(max_new_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
MESH = Mesh(data=2, model=2)


def write(config, folder):
    """The steps that two prompts need, and what admits."""
    engine = AbsentEngine(config, targets.parse("cpu"))
    needed = step_shapes.expected(engine.config.engine, [9], 1, num_shards=config.mesh.num_groups)
    with compilation_cache.disabled():
        return engine.write(needed, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("executables")
    written = write(CONFIG, found)
    assert sorted(found.iterdir()) == sorted(written)  # no other file is left
    return found


@pytest.fixture
def copied(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def answers(folder=None, config=CONFIG):
    """Tokens and log-probabilities of two requests in turn, and how many programs were loaded."""
    engine = Engine(config, fakes.real_params(config.model), executables=folder)
    found = [
        engine.generate([prompt], params)[0]
        for prompt, params in ((range(3, 12), fakes.greedy(6)), (range(5, 90, 2), DRAWN))
    ]
    futures = engine.model_runner.executables._compilations.values()
    loaded = [isinstance(future.result(), LoadedExecutable) for future in futures]
    return [(each.token_ids, each.logprobs) for each in found], sum(loaded), len(loaded)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    found = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation_cache, "_directory", found)
        yield found


@pytest.fixture(scope="module")
def compiled(cache):
    found, num_loaded, _ = answers()
    assert num_loaded == 0
    return found


def test_loaded_executables_give_the_tokens_of_compiled_ones(folder, compiled, caplog):
    found, num_loaded, num_programs = answers(folder)
    assert found == compiled and num_loaded == num_programs == 3
    assert not caplog.messages


def test_what_a_start_compiles_the_next_one_loads(folder, cache, compiled, caplog):
    assert {path.name for path in cache.iterdir()} == {path.name for path in folder.iterdir()}
    found, num_loaded, num_programs = answers()
    assert found == compiled and num_loaded == num_programs == 3
    assert not caplog.messages


def cached(folder, name, size=1000, age=0):
    """The file of a program of so many bytes in a cache, last used that many seconds ago."""
    own = files.ExecutableFiles(folder, CONFIG, "reference", jax.devices()[:1], None, is_cache=True)
    program = Mock(out_info=(), runtime_executable=lambda: Mock(serialize=lambda: bytes(size)))
    own.keep(name, ((), (), ()), program)
    (path,) = folder.glob(f"{name}-*")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - age * 10**9))
    return path


def test_the_least_recently_used_make_room(tmp_path, monkeypatch):
    first, second, third = (cached(tmp_path, name, age=99 - nth) for nth, name in enumerate("abc"))
    size = first.stat().st_size
    monkeypatch.setattr(files, "_MOST_KEPT", 3 * size)
    monkeypatch.setattr(files, "LoadedExecutable", Mock())
    used = files.ExecutableFiles(tmp_path, CONFIG, "reference", jax.devices()[:1], None, True)
    assert used.load("a", ((), (), ())) is not None
    fourth = cached(tmp_path, "d")
    assert {*tmp_path.iterdir()} == {first, third, fourth}
    largest = cached(tmp_path, "e", 9 * size)
    assert {*tmp_path.iterdir()} == {largest}


@pytest.mark.parametrize("part", ["sources", "_packages", "_this_processor"])
def test_what_another_version_cached_is_not_looked_at(tmp_path, monkeypatch, caplog, part):
    cached(tmp_path, "a")
    monkeypatch.setattr(files, "LoadedExecutable", Mock())
    monkeypatch.setattr(key, part, lambda *args: "another")
    other = files.ExecutableFiles(tmp_path, CONFIG, "reference", jax.devices()[:1], None, True)
    assert other.load("a", ((), (), ())) is None
    assert not caplog.messages


def test_a_damaged_file_of_a_cache_is_written_again(cache, compiled, caplog):
    (path,) = cache.glob("decode2x1-*")
    path.write_bytes(path.read_bytes()[:-1])
    found, num_loaded, _ = answers()
    assert found == compiled and num_loaded == 2
    (line,) = caplog.messages
    assert "it is damaged, or no file of an executable" in line
    found, num_loaded, num_programs = answers()
    assert found == compiled and num_loaded == num_programs
    assert len(caplog.messages) == 1


def test_a_cache_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    own = files.ExecutableFiles(file, CONFIG, "reference", jax.devices()[:1], None, is_cache=True)
    program = Mock(out_info=(), runtime_executable=lambda: Mock(serialize=lambda: b""))
    for _ in range(2):
        own.keep("a", ((), (), ()), program)
    (line,) = caplog.messages
    assert line.startswith("executables are not kept: cannot write")


def test_what_xla_cannot_write_is_not_kept(tmp_path, caplog):
    cache = files.ExecutableFiles(tmp_path, CONFIG, "reference", jax.devices()[:1], None, True)
    fails = Mock(side_effect=jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing"))
    program = Mock(out_info=(), runtime_executable=lambda: Mock(serialize=fails))
    cache.keep("a", ((), (), ()), program)
    (line,) = caplog.messages
    assert line == "executables are not kept: UNIMPLEMENTED: no such thing"
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_on_a_mesh(tmp_path, caplog):
    config = dataclasses.replace(CONFIG, mesh=MESH)
    write(config, tmp_path)
    found, num_loaded, num_programs = answers(tmp_path, config)
    assert num_loaded == num_programs == 3
    assert found == answers(None, config)[0]
    assert answers(tmp_path, CONFIG)[1] == 0 and "differ in mesh, devices" in caplog.messages[0]


@pytest.mark.parametrize(
    "change, part",
    [
        ({"max_context": 48}, "differ in cache's shapes;"),
        ({"top_logprobs": 2}, "differ in engine;"),
    ],
    ids=str,
)
def test_files_of_another_program_are_not_used(folder, change, part, caplog):
    _, num_loaded, _ = answers(folder, CONFIG.with_engine(**change))
    assert num_loaded < 2
    (line,) = caplog.messages  # for all of them
    assert part in line and line.endswith("; it is compiled")


def of_engine(devices=None, config=CONFIG):
    return key.of_engine(config, "reference", devices or jax.devices("cpu")[:1], None)


def test_what_the_scheduler_alone_knows_of_does_not_count():
    """How many snapshots there are says the cache's shape."""
    changes = {"prefix_cache": False, "overlap": False, "snapshots": 5, "snapshot_tokens": 64}
    assert of_engine(config=CONFIG.with_engine(**changes)) == of_engine()


def differing(before):
    after = of_engine()
    return [part for part in before if before[part] != after[part]]


def test_files_that_flags_name_count_with_their_contents(tmp_path, monkeypatch):
    tuned, flags = tmp_path / "tuned.txt", tmp_path / "flags"
    tuned.write_text("1")
    flag = f"--xla_gpu_load_autotune_results_from={tuned}"
    flags.write_text(f"{flag}\n")
    jax.devices()  # XLA has read its flags
    for text in (f"--xla_cpu_enable_fast_math=true {flag}", str(flags)):
        tuned.write_text("1")
        monkeypatch.setenv("XLA_FLAGS", text)
        before = of_engine()
        assert not differing(before)
        tuned.write_text("2")
        assert differing(before) == ["compiler flags"]
    flags.write_text("--xla_cpu_enable_fast_math=false")
    assert differing(before) == ["compiler flags"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    before = of_engine()
    monkeypatch.setenv(
        "XLA_FLAGS", f"--xla_cpu_enable_fast_math=false --xla_gpu_dump_autotune_results_to={tuned}"
    )
    assert not differing(before)


@pytest.mark.parametrize(
    "name, value",
    [("jax_optimization_level", "O1"), ("jax_disable_most_optimizations", True),
     ("jax_numpy_dtype_promotion", "strict")],
)  # fmt: skip
def test_options_of_jax_that_change_programs_count(name, value):
    before, was = of_engine(), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert differing(before) == ["options of jax"]
    finally:
        jax.config.update(name, was)


def test_libraries_and_neighbours_count(monkeypatch):
    def packages(version):
        key._packages.cache_clear()
        installed = {"jax": "1", "jaxlib": "1", "nvidia-cudnn-cu13": version, "other": version}
        found = [Mock(metadata={"Name": name}) for name in installed]
        monkeypatch.setattr(key.importlib.metadata, "distributions", lambda: found)
        monkeypatch.setattr(key, "_version", lambda name: f"{name} {installed.get(name)}")
        return key._packages("gpu")

    assert packages("9.1") != packages("9.2") and "other" not in packages("9.1")
    key._packages.cache_clear()
    monkeypatch.undo()

    def places(*coords):
        return of_engine([
            Mock(platform="tpu", device_kind="TPU v6 lite", coords=[x, y, 0], core_on_chip=0)
            for x, y in coords
        ])["places of devices"]  # fmt: skip

    assert places((0, 0), (1, 0)) != places((0, 0), (0, 1))
    assert places((0, 0)) == places((1, 0))


_DAMAGES = {
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a body of one byte": lambda data: data[:16] + hashlib.sha256(b"1").digest() + b"1",
    "another file": lambda data: b"\x80\x04" * 999,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_files_are_not_used(copied, compiled, damage, caplog):
    for path in copied.glob("decode2x1-*"):
        path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    found, num_loaded, _ = answers(copied)
    assert found == compiled and num_loaded == 2
    (line,) = caplog.messages
    assert "it is damaged, or no file of an executable" in line


def test_files_that_others_may_write_are_not_used(copied, compiled, caplog):
    for path in copied.glob("decode2x1-*"):
        path.chmod(0o666)
    found, num_loaded, _ = answers(copied)
    assert found == compiled and num_loaded == 2
    assert "can be written by other users: chmod go-w" in caplog.messages[0]
    copied.chmod(0o777)
    assert answers(copied)[1] == 0


def test_what_the_runtime_refuses_is_compiled(copied, compiled, caplog, monkeypatch):
    def refuse(*args):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: another version")

    monkeypatch.setattr(LoadedExecutable, "__init__", refuse)
    found, num_loaded, _ = answers(copied)
    assert found == compiled and num_loaded == 0
    assert "another version" in caplog.messages[0]


def test_other_arguments_are_refused(folder):
    engine = Engine(CONFIG, fakes.real_params(CONFIG.model), executables=folder)
    runner = engine.model_runner
    admit, admissions = runner.executables.admit(), batch.build_admissions((), CONFIG)
    with pytest.raises(TypeError, match="compiled for arguments"):
        admit(runner.cache, runner.slots)
    with pytest.raises(TypeError, match="compiled for"):
        admit(runner.cache, runner.slots, jax.tree.map(np.float32, admissions))


def test_arguments_on_other_devices_are_refused(folder):
    engine = Engine(CONFIG, fakes.real_params(CONFIG.model), executables=folder)
    runner = engine.model_runner
    admit, admissions = runner.executables.admit(), batch.build_admissions((), CONFIG)
    elsewhere = jax.device_put(runner.slots, jax.devices()[1])
    with pytest.raises(TypeError, match="not on "):
        admit(runner.cache, elsewhere, admissions)


def test_of_files_of_other_programs_only_headers_are_read(copied, caplog, monkeypatch):
    monkeypatch.setattr(files, "_read", Mock(side_effect=FileNotFoundError))
    for path in copied.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])  # what they hold is not looked at
    monkeypatch.setattr(key, "sources", lambda: "another version's")
    answers(copied)
    assert "those that are there differ in code of this version; it is" in caplog.messages[0]


def test_several_hosts_load_none(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="executables are loaded on one host only"):
        Engine(CONFIG, fakes.real_params(CONFIG.model), executables=folder)


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write(CONFIG, file / "below")
