"""The training loop: resumed, divided over chips and in parts it computes the same."""

import dataclasses
import errno
import resource
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from configs.errors import InputError
from configs.mesh import Mesh
from configs.recipes.training import Recipe, TrainingConfig
from inference.checkpoints.native import orbax_step
from inference.files import atomic, staging
from inference.training import loop, losses, start
from inference.training.step_folder import StepFolder
from inference.training.windows import Windows
from tests import fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama(num_layers=1)
TRAINING = TrainingConfig(
    steps=6, batch=4, window=16, learning_rate=1e-2, warmup_steps=1, checkpoint_every=2
)
DATA = Windows(np.random.default_rng(0).integers(0, 131, 300).astype(np.uint16), 16, 4, seed=0)


def run(folder=None, steps=99, mesh=None, data=DATA, **changes):
    """Parameters and losses, as numpy arrays."""
    training = dataclasses.replace(TRAINING, **changes)
    values = start.masters(Recipe(MODEL, training, mesh or Mesh()))
    seen = []
    values = loop.train(
        losses.next_token(MODEL), values, data, training, folder=folder,
        observe=lambda so_far: seen.append(so_far.copy()), stop=lambda: len(seen) >= steps,
    )  # fmt: skip
    return jax.device_get(values), seen[-1]


@pytest.fixture(scope="module")
def straight():
    return run()


def test_the_loss_falls_where_there_is_something_to_learn():
    class Same:
        def batch(self, step):
            return {"tokens": DATA.batch(0)["tokens"]}

    _, found = run(data=Same())
    assert found[0] == pytest.approx(np.log(131), abs=1) and found[-1] < found[0] - 0.5


def test_interrupted_and_resumed_it_is_the_same_bit_for_bit(straight, tmp_path):
    folder = StepFolder(tmp_path / "run", {"seed": 0})
    run(folder, steps=3)
    assert folder.newest().name == "00000003"
    chex.assert_trees_all_equal(run(StepFolder(tmp_path / "run", {"seed": 0})), straight)
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == ["00000004", "00000006", "run.json"]


def test_a_step_holds_parameters_that_an_engine_takes(straight, tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    run(folder)
    assert orbax_step.is_step(folder.newest())
    found = orbax_step.open_tensors(folder.newest())
    table = found.read("embed/table", 0, 131)
    assert np.array_equal(table, straight[0]["embed"]["table"])


def test_in_parts_it_is_the_same_up_to_rounding(straight):
    chex.assert_trees_all_close(run(accumulate=2), straight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [Mesh(data=2, model=2), Mesh(data=4)])
def test_over_chips_it_is_the_same_up_to_rounding(straight, mesh):
    chex.assert_trees_all_close(run(mesh=mesh), straight, rtol=1e-4, atol=1e-5)


def test_the_chips_divide_parameters_and_moments():
    recipe = Recipe(MODEL, TRAINING, Mesh(data=2, model=2))
    values = start.masters(recipe)
    state = loop.init(values, TRAINING)
    for tree in (values, state.optimizer[1][0].mu):
        qkv = tree["layers"][0]["mixer"]["qkv"]
        assert qkv.addressable_shards[0].data.shape == (qkv.shape[0] // 2, qkv.shape[1])
        down = tree["layers"][0]["ffn"]["down"]
        assert down.addressable_shards[0].data.shape == (down.shape[0], down.shape[1] // 2)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capfd):
    """Orbax, which would find it full, prints traces."""
    folder = StepFolder(tmp_path, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(InputError, match="of step 1: .*No space left on device; the last good"):
        folder.save(1, {"a": np.ones(9)})
    assert not capfd.readouterr().err


def test_a_step_that_cannot_be_written_leaves_the_last_good_one(straight, tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    run(folder, steps=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))  # as a full disk would
        with pytest.raises(InputError, match="cannot write the checkpoint of step 4.*00000002"):
            run(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["00000002", "run.json"]
    chex.assert_trees_all_equal(run(folder), straight)


def _cut(place: Path) -> str:
    for path in place.rglob("*"):
        if path.is_file() and path.name != "sha256.json":
            path.write_bytes(path.read_bytes()[:5])
    return r"00000004 is damaged: its \S+ is not what was written"


def _changed(place: Path) -> str:
    """A byte of an array, which Orbax reads as another number."""
    path = max((place / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"00000004 is damaged: its .*{path.name} is not what was written"


def _missing(place: Path) -> str:
    (place / "manifest.ocdbt").unlink()
    return "00000004 is damaged: its manifest.ocdbt is missing"


def _unsound(place: Path) -> str:
    """Without digests, as when a run is killed before they are written."""
    (place / "sha256.json").unlink()
    (place / "_METADATA").write_text("{")
    return "cannot read .*00000004: "


@pytest.mark.parametrize("damage", [_cut, _changed, _missing, _unsound])
def test_a_damaged_step_is_said_beside_the_last_good_one(straight, damage, tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    run(folder, steps=4)
    newest = folder.newest()
    cause = damage(newest)
    way_on = f"; the last good one is .*00000002: remove {newest} to go on from there$"
    with pytest.raises(InputError, match=cause + ".*" + way_on) as caught:
        run(folder)
    assert "\n" not in str(caught.value)
    shutil.rmtree(newest)
    chex.assert_trees_all_equal(run(folder), straight)


def test_where_no_step_is_good_a_run_starts_over(straight, tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    run(folder, steps=4)
    for name in ("00000002", "00000004"):
        _missing(folder.path / name)
    each = "; ".join(f"{folder.path}/0000000{n} is damaged: its .* is missing" for n in (4, 2))
    way_on = f"no step is good as it is: remove {folder.path} to start over"
    with pytest.raises(InputError, match=f"^{each}; {way_on}$"):
        run(folder)
    shutil.rmtree(folder.path)
    chex.assert_trees_all_equal(run(folder), straight)


def test_where_digests_alone_are_damaged_a_step_may_go_unchecked(straight, tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    run(folder, steps=4)
    for name in ("00000002", "00000004"):
        (folder.path / name / "sha256.json").write_text("{")
    newest = folder.newest()
    way_on = (
        f"^{newest} cannot be checked, since its sha256.json is damaged: remove that file to go"
    )
    with pytest.raises(InputError, match=way_on):
        run(folder)
    (newest / "sha256.json").unlink()
    chex.assert_trees_all_equal(run(folder), straight)


def test_a_step_whose_digests_cannot_be_written_is_whole(straight, monkeypatch, tmp_path):
    folder, open_file = StepFolder(tmp_path / "run", {}), atomic.open_file

    def failing(path, is_kept=False):
        if path == folder.path / "00000004" / "sha256.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, is_kept)

    monkeypatch.setattr(atomic, "open_file", failing)
    message = "00000004 is whole, and the last good one, but .* cannot be written: .*No space left"
    with pytest.raises(InputError, match=message) as caught:
        run(folder)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    chex.assert_trees_all_equal(run(folder), straight)


def test_a_store_that_takes_no_step_ends_a_run_at_its_last(straight, monkeypatch, tmp_path, caplog):
    folder, calls, num_failing = StepFolder(tmp_path / "run", {}), [], 1

    def keep_alike(path, last):
        calls.append({name.name for name in path.glob("0*")})
        if len(calls) <= num_failing:
            raise InputError("cannot use s3://models/run: away")

    monkeypatch.setattr(staging, "keep_alike", keep_alike)
    chex.assert_trees_all_equal(run(folder), straight)
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert warning == (
        f"cannot use s3://models/run: away; step 2 is whole in {folder.path}/00000002, and "
        "training goes on"
    )
    assert calls[0] == {"00000002"} and calls[-1] == {"00000004", "00000006"}
    num_failing = len(calls) + 1
    message = f"away; the last step is whole in {folder.path}/00000006: the same command on this"
    with pytest.raises(InputError, match=message):
        run(folder)  # which has no step to do, but the store has not the last one
    chex.assert_trees_all_equal(run(folder), straight)


def test_another_runs_steps_are_refused(tmp_path):
    run(StepFolder(tmp_path / "run", {"model": {"widths": [1, 2]}}), steps=1)
    with pytest.raises(InputError, match=r"another run: its model.widths.1 is 2, not 3"):
        StepFolder(tmp_path / "run", {"model": {"widths": [1, 3]}})


def test_a_loss_without_a_number_ends_it(tmp_path):
    folder = StepFolder(tmp_path / "run", {})
    with pytest.raises(InputError, match=r"the loss of step \d is (nan|inf)"):
        run(folder, learning_rate=1e30, clip_norm=1e30, warmup_steps=0)


def test_what_is_frozen_is_given_to_the_loss_and_kept():
    def loss(values, frozen, batch):
        return ((values["w"] - frozen["target"]) ** 2).sum() + 0.0 * batch.sum()

    class Nothing:
        def batch(self, step):
            return np.zeros((4, 1), np.float32)

    frozen = {"target": jax.numpy.arange(3.0)}
    training = dataclasses.replace(TRAINING, steps=60, learning_rate=0.3, weight_decay=0.0)
    found = loop.train(loss, {"w": jax.numpy.zeros(3)}, Nothing(), training, frozen=frozen)
    np.testing.assert_allclose(found["w"], frozen["target"], atol=0.1)
