"""`scripts.compile`: what it refuses, and a report for the machine at hand."""

import json

import pytest

from scripts import compile as script
from tests.scripts import apps

_TINY = f"--model={apps.TINY}"

pytestmark = pytest.mark.quick_code


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return lambda *args: apps.call(script, monkeypatch, capfd, *args)


_REFUSED = {
    "no target": ([], "--target names what to compile for: h200, 8xh200, v5e:2x4"),
    "unknown": (["--target=b200"], "no target 'b200'; valid: h200, 8xh200"),
    "no such slice": (["--target=v5e:3x3"], "no slice '3x3' of v5e"),
    "a mesh of other devices": (
        ["--target=8xh200", "--mesh=model=4"],
        "mesh model=4 is 4 devices, --target=8xh200 has 8",
    ),
    "a mesh of other devices, set": (
        ["--target=8xh200", "--set=mesh.model=4"],
        "mesh model=4 is 4 devices, --target=8xh200 has 8",
    ),
    "no directory": (
        ["--target=cpu", "--serialize=/proc/nothing"],
        "cannot write --serialize=/proc/nothing: No such file or directory",
    ),
    "an unknown axis": (["--target=h200", "--mesh=heads=2"], "with the axes data, model, expert"),
    "no compiler": (["--target=h200"], "not installed: pip install '.[gpu]'"),
    "no compiler of TPUs": (["--target=v6e:1x1"], "not installed: pip install '.[tpu]'"),
    "batches": (["--target=cpu", "--batch=1,2"], "--batch is one number here, not '1,2'"),
    "no sequences": (["--target=cpu", "--batch=0"], "--batch takes whole numbers from 1"),
    "context": (
        ["--target=cpu", "--context=4096"],
        "max_context=4096: must be from 1 to the",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refused(run, case, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args, message = _REFUSED[case]
    assert message in run(_TINY, *args).error


def test_a_directory_that_others_may_write_is_refused(run, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    error = run(_TINY, "--target=cpu", f"--serialize={tmp_path / 'shared'}").error
    assert "others may write there" in error and "chmod go-w" in error


def test_a_report_of_this_machine(run):
    """Weights and cache of the compiled programs are the planner's, to the byte."""
    ran = run(
        _TINY, "--target=cpu", "--batch=3", "--context=100",
        "--set=engine.kernels.linear=reference", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    predicted = found["predicted"]
    assert [step["name"] for step in found["steps"]] == ["decode 3 x 1", "prefill 8 x 64"]
    for step in found["steps"]:
        held = step["program"]["argument_bytes"]
        assert held["params"] == predicted["weight_bytes"]
        assert held["cache"] == predicted["cache_bytes"]
        planned = predicted["weight_bytes"] + predicted["cache_bytes"] + step["input_bytes"]
        assert planned == sum(held.values()) == step["argument_bytes"] < step["total_bytes"]
        assert step["compile_s"] > 0 and step["program"]["launches"]["ffn"]
    assert found["fits"] and found["predicted_fits"] and found["collectives"] == {}
    assert found["bytes_per_chip"] == max(step["total_bytes"] for step in found["steps"])
    assert found["config"]["engine"]["max_seqs"] == 3


def test_what_does_not_fit_is_said(run, monkeypatch):
    monkeypatch.setattr("inference.planner.calibration.measure.this_memory", lambda: 1e5)
    ran = run(_TINY, "--target=cpu", "--batch=2", "--context=64")
    lines = ran.out.splitlines()
    assert "predicted, a chip: weights" in lines[1] and lines[1].endswith("does not fit")
    assert lines[-1].startswith("does not fit: ") and "of 100,000 bytes a chip" in lines[-1]
