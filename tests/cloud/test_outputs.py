"""What is written to s3:// and gs://, against emulators of both; `make test-cloud` runs this."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("moto", reason="make test-cloud has it")
pytest.importorskip("obstore", reason="make test-cloud has it")

from configs.errors import InputError
from inference.checkpoints import manifest, new_directory, resolve
from inference.files import object_store, staging
from inference.training import step_folder
from inference.training.step_folder import StepFolder
from layers import decoder, params
from tests.cloud import conftest, servers
from tests.inference.checkpoints import test_convert

ROOT = Path(__file__).parents[2]
TINY = test_convert.GOLDEN / "llama-tokenizer"
LARGE = 12 << 20  # bytes, of three parts


def _url(store, key):
    return f"{store.scheme}://{servers.BUCKET}/{key}"


def _names(url):
    return {item.url.removeprefix(f"{url}/") for item in object_store.listed(url)}


def _files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _run(app, *arguments, env):
    command = [sys.executable, "-m", f"scripts.{app}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)


def _values(model):
    checkpoint = resolve.resolve(str(model)).open(None)
    loaded = checkpoint.load_params(decoder.param_infos(checkpoint.config))
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


def test_a_large_file_goes_in_parts_and_comes_back(s3, reaches, tmp_path):
    """Of S3 alone: no emulator of Google's takes parts."""
    reaches(s3)
    content = np.random.default_rng(0).bytes(LARGE)
    path, url = tmp_path / "large", _url(s3, "large/file")
    path.write_bytes(content)
    object_store.upload(url, path)
    assert object_store.read(object_store.find(url), 0, LARGE) == content


def test_a_converted_checkpoint_is_in_the_store_alone(store, reaches, tmp_path):
    relay = reaches(store)
    env, url = servers.environment(store, relay, tmp_path / "cache"), _url(store, "made/tiny")
    flags = f"--model={TINY}", f"--output={url}"
    ran = _run("convert", *flags, "--json", env=env)
    assert ran.returncode == 0 and json.loads(ran.stdout)["output"] == url, ran.stderr
    assert manifest.NAME in _names(url) and not _files(tmp_path / "cache" / "outputs")
    expected = _values(TINY)
    assert {path: array.tobytes() for path, array in _values(url).items()} == {
        path: array.tobytes() for path, array in expected.items()
    }
    again = _run("convert", *flags, env=env)
    assert again.stderr == f"error: {url}: exists already\n" and again.returncode == 1


def test_what_a_store_does_not_take_stays_here(s3, reaches):
    relay, url = reaches(s3), _url(s3, "refused/model")
    with new_directory.create(output := new_directory.target(url)) as folder:
        (folder / "part").write_bytes(b"weights")
        (folder / manifest.NAME).write_bytes(b"{}")
    relay.refuses = True
    with pytest.raises(InputError, match="not allowed; valid credentials: .*; what it would get"):
        new_directory.published(output)
    with pytest.raises(InputError, match="not allowed; valid credentials: AWS_ACCESS_KEY_ID"):
        new_directory.target(_url(s3, "other"))
    relay.refuses = False
    assert (output / "part").read_bytes() == b"weights" and not object_store.listed(url)
    assert new_directory.published(output) == url and not output.exists()
    assert _names(url) == {"part", manifest.NAME}
    with pytest.raises(InputError, match="there is no bucket s3://no-such-bucket"):
        new_directory.target("s3://no-such-bucket/model")


def test_executables_are_written_and_loaded(s3, reaches, tmp_path):
    relay, url = reaches(s3), _url(s3, "executables")
    env = servers.environment(s3, relay, tmp_path / "cache")
    sizes = ("--set=engine.max_seqs=2", "--set=engine.max_context=64",
             "--set=engine.shapes.decode_rows=(2,)", "--set=engine.shapes.prefill_chunks=(1,)",
             "--set=engine.cache.cache_bytes=1000000")  # fmt: skip
    compiled = _run("compile", f"--model={TINY}", "--target=cpu", f"--serialize={url}", *sizes,
                    env=env)  # fmt: skip
    assert compiled.returncode == 0 and f"--executables={url} " in compiled.stdout, compiled
    assert not _files(tmp_path / "cache" / "outputs") and _names(url)
    request = "--prompt=the cat sat", "--max_new_tokens=4", f"--executables={url}"
    ran = _run("generate", f"--model={TINY}", *request, *sizes, env=env)
    assert ran.returncode == 0 and "is compiled" not in ran.stderr and "has no" not in ran.stderr


def _state(step):
    return {"weights": jnp.full((4, 8), step, jnp.float32), "step": jnp.int32(step)}


def _restored(folder, *record):
    return int(StepFolder(folder, *record).restore(_state(0))["step"])


def test_training_goes_on_from_the_steps_in_a_store(store, reaches, monkeypatch, tmp_path):
    reaches(store)
    url, record = _url(store, "run.training"), {"task": "lm"}
    place = staging.writable_place(url)
    folder = StepFolder(place, record)
    for step in (10, 20, 30):
        folder.save(step, _state(step))
        assert _names(url) == _files(place)
    assert {name.partition("/")[0] for name in _names(url)} == {"run.json", "00000020", "00000030"}

    def on_another_machine():
        shutil.rmtree(tmp_path / "cache")
        conftest.start_anew(monkeypatch)

    stale = shutil.copytree(place, tmp_path / "stale")
    on_another_machine()
    assert _restored(place, record) == 30
    with pytest.raises(InputError, match="holds checkpoints of another run: its task is 'lm'"):
        StepFolder(place, {"task": "draft"})
    on_another_machine()
    folder = StepFolder(place, record)
    for step in (40, 50):
        folder.save(step, _state(step))
    shutil.rmtree(place)
    shutil.copytree(stale, place)  # as the first machine has it
    assert _restored(place, record) == 50
    on_another_machine()  # after one that was killed while it wrote
    object_store.remove([object_store.find(f"{url}/00000050/{step_folder._DIGESTS}")])
    assert _restored(place, record) == 40
    staging.discard(place)
    assert not place.exists() and not object_store.listed(url)


@pytest.mark.parametrize("first_task", ["lm", "draft"])
def test_a_step_that_two_machines_saved_is_the_second_ones(
    store, first_task, reaches, monkeypatch, tmp_path
):
    """The first one dies while it uploads its first step."""
    reaches(store)
    url = _url(store, f"twice-{first_task}.training")
    place = staging.writable_place(url)

    def on_another_machine():
        shutil.rmtree(tmp_path / "cache")
        conftest.start_anew(monkeypatch)
        staging.writable_place(url)

    def upload(to, path):
        if path.name == step_folder._DIGESTS:
            raise KeyboardInterrupt
        uploaded(to, path)

    uploaded = object_store.upload
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "upload", upload)
        with pytest.raises(KeyboardInterrupt):
            StepFolder(place, {"task": first_task}).save(50, _state(1))
    first = _names(url)
    assert {"run.json", "00000050/manifest.ocdbt"} <= first
    on_another_machine()
    folder = StepFolder(place, {"task": "lm"})
    assert folder.newest() is None
    folder.save(50, _state(2))
    assert _names(url) == _files(place) != first
    on_another_machine()
    assert _restored(place, {"task": "lm"}) == 2


def test_training_goes_on_where_a_store_takes_no_step(s3, reaches, monkeypatch, tmp_path, caplog):
    relay, url, record = reaches(s3), _url(s3, "away.training"), {"task": "lm"}
    folder = StepFolder(place := staging.writable_place(url), record)
    relay.refuses = True
    folder.save(10, _state(10))
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.name == "absl")
    assert (
        f"not allowed; valid credentials: {object_store._CREDENTIALS['s3']}; step 10 is" in warning
    )
    assert f"whole in {place}/00000010" in warning and "\n" not in warning
    folder.save(20, _state(20))
    with pytest.raises(InputError, match=f"the last step is whole in {place}/00000020: the same"):
        folder.finish()
    relay.refuses = False
    assert not _names(url)
    StepFolder(place, record).finish()
    assert _names(url) == _files(place)
    shutil.rmtree(tmp_path / "cache")
    conftest.start_anew(monkeypatch)
    assert _restored(place, record) == 20


def test_a_damaged_step_is_named(s3, reaches, tmp_path):
    reaches(s3)
    url, record = _url(s3, "damaged.training"), {"task": "lm"}
    folder = StepFolder(staging.writable_place(url), record)
    folder.save(10, _state(10))
    name = next(name for name in _names(url) if "/d/" in name)
    object_store.write(f"{url}/{name}", b"other")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(InputError, match=f"is damaged: its {name.partition('/')[2]} is not what"):
        _restored(staging.place(url), record)
