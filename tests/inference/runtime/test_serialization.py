"""Executables in files: the tokens of compiled ones, and files that are not used."""

import dataclasses

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
from inference.runtime.serialization.loaded import LoadedExecutable
from inference.scheduling import step_shapes
from tests import fakes

pytestmark = pytest.mark.quick_code

ENGINE = EngineConfig(max_seqs=2, max_context=64, cache_bytes=1 << 17, prefill_chunks=(1,), seed=1)
CONFIG = Config(fakes.llama(num_layers=1), ENGINE)
DRAWN = SamplingParams(max_new_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
MESH = Mesh(data=2, model=2)


def write(config, folder):
    """The steps that two prompts need, and what admits."""
    shapes = step_shapes.enumerate_shapes(config.engine)
    needed = [
        shape for shape in shapes if not (shape.scored or all((*shape.decode, *shape.prefill)))
    ]
    with compilation_cache.disabled():
        return AbsentEngine(config, targets.parse("cpu")).write(needed, folder)


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
    futures = engine.model_runner._executables._found.values()
    loaded = [isinstance(future.result(), LoadedExecutable) for future in futures]
    return [(each.token_ids, each.logprobs) for each in found], sum(loaded), len(loaded)


@pytest.fixture(scope="module")
def compiled():
    return answers()[0]


def test_loaded_executables_give_the_tokens_of_compiled_ones(folder, compiled, caplog):
    found, num_loaded, num_programs = answers(folder)
    assert found == compiled and num_loaded == num_programs == 3
    assert not caplog.messages


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
    engine = dataclasses.replace(ENGINE, **change)
    _, num_loaded, _ = answers(folder, dataclasses.replace(CONFIG, engine=engine))
    assert num_loaded < 2
    (line,) = caplog.messages  # for all of them
    assert part in line and line.endswith("; it is compiled")


_DAMAGES = {
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "another file": lambda data: b"\x80\x04" * 999,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_files_are_not_used(copied, compiled, damage, caplog):
    for path in copied.glob("decode*"):
        path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    found, num_loaded, _ = answers(copied)
    assert found == compiled and num_loaded == 2
    (line,) = caplog.messages
    assert "it is damaged, or no file of an executable" in line


def test_files_that_others_may_write_are_not_used(copied, compiled, caplog):
    for path in copied.glob("decode*"):
        path.chmod(0o666)
    found, num_loaded, _ = answers(copied)
    assert found == compiled and num_loaded == 2
    assert "others may write to it" in caplog.messages[0]
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
    admit, admissions = runner._executables.admit(), batch.build_admissions((), CONFIG)
    with pytest.raises(TypeError, match="compiled for arguments"):
        admit(runner.cache, runner.slots)
    with pytest.raises(TypeError, match="compiled for"):
        admit(runner.cache, runner.slots, jax.tree.map(np.float32, admissions))


def test_several_hosts_load_none(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="executables are loaded on one host only"):
        Engine(CONFIG, fakes.real_params(CONFIG.model), executables=folder)


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write(CONFIG, file / "below")
