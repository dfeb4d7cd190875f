"""`python -m scripts.plan --verify` on tiny models: real steps, predicted and measured."""

import json

import numpy as np
import pytest

from configs import presets
from configs.errors import InputError
from configs.kinds.recurrent.mamba import Mamba2
from inference.benchmark import steps
from inference.files import local_machine
from inference.planner.calibration import lookup, measure, store, verify
from inference.runtime import adapter_stacks
from inference.scheduling import step_shapes
from inference.scheduling.step_shapes import StepShape
from layers import registry
from scripts import plan
from scripts.modes import plan_verify
from tests import fakes
from tests.layers import native
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

# Of whole strips, so that packed weights have no padding.
MODEL = fakes.llama(max_context=1024, width=32, vocab_size=144).with_kinds(width=32)


@pytest.fixture(params=["prompts alone", "prompts beside padding"])
def tiny(request, monkeypatch, tmp_path, no_draws):
    """Few points of a tiny model in one more format, and a cheap probe."""
    is_free = request.param == "prompts beside padding"
    if is_free:  # which only the native products leave out
        native.need()
    shapes = [(4 * is_free, 1), (4 * is_free, 2), (4, 0)]
    monkeypatch.setattr(step_shapes, "leaves_padding_out", lambda *given: is_free)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_verify, "_FORMATS", ("int8",))
    monkeypatch.setattr(verify, "_ROWS", (1, 4))
    monkeypatch.setattr(verify, "_CONTEXTS", (100, 512, 4096))
    monkeypatch.setattr(verify, "_CHUNKS", ((2, 128), (1, 300)))
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e11)
    monkeypatch.setattr(measure.Probe, "read", lambda self: 1e10)
    monkeypatch.setattr(plan_verify.compilation_cache, "enable", lambda: None)
    monkeypatch.setattr(
        step_shapes, "enumerate_shapes",
        lambda engine: tuple(
            StepShape((rows, 1), (chunks, 64)) for rows, chunks in shapes
        ),
    )  # fmt: skip
    monkeypatch.setitem(presets.NAMES, "tiny", presets.Preset(MODEL, None))
    return tmp_path


def test_the_page_and_the_calibrations(tiny, monkeypatch, capfd):
    page = tiny / "verify.md"
    call = ("--model=tiny", "--verify", f"--output={page}", "--json")
    ran = apps.call(plan, monkeypatch, capfd, *call)
    assert ran.status == 0, ran.err
    answer = json.loads(ran.out)
    sizes = [(row["size"], row["context"]) for row in answer["rows"]]
    expected = [("1 rows", 100), ("1 rows", 512), ("4 rows", 100), ("4 rows", 512)]
    expected += [("2 x 64 tokens", 128), ("1 x 64 tokens", 300)]
    assert sizes == 2 * expected
    for row in answer["rows"]:
        assert row["measured_s"] > 0 and row["predicted_s"] > 0 and row["roofline_s"] > 0
    assert [held["weights"] for held in answer["models"]] == [MODEL.dtype, "int8"]
    for held in answer["models"]:
        assert held["predicted_weight_bytes"] == held["weight_bytes"]
        assert held["predicted_cache_bytes"] == held["cache_bytes"]
    assert answer["median_error"] <= answer["largest_error"]
    assert answer["processor"] and answer["cores"] == local_machine.num_cores()
    text = page.read_text()
    assert "Median error **" in text and text.count(f"| {MODEL.name} |") == len(answer["rows"])
    for each in plan_verify.models(MODEL):
        kept = store.calibration(each)
        assert kept is not None and kept.is_calibrated and lookup.get("cpu", each) == kept


def test_steps_with_adapters_are_timed_beside_others(tiny, monkeypatch, capfd):
    timed, ranks = steps.run, []

    def noted(runner, *args):
        ranks.extend(np.asarray(slots) for *_, slots in runner.params[adapter_stacks.NAME].values())
        return timed(runner, *args)

    monkeypatch.setattr(steps, "run", noted)
    # Of whole strips, as the model.
    room = "--set=engine.adapters.slots=2", "--set=engine.adapters.rank=32"
    call = "--model=tiny", "--verify", "--json", *room
    ran = apps.call(plan, monkeypatch, capfd, *call)
    assert ran.status == 0, ran.err
    answer = json.loads(ran.out)
    sizes = [row["size"] for row in answer["rows"] if "adapters" in row["size"]]
    few = ["1 rows, 1 adapters", "4 rows, 2 adapters", "2 x 64 tokens, 1 adapters"]
    assert sizes == 2 * few
    # A slot without ranks takes no time.
    assert ranks and all(slots.tolist() == [32, 32] for slots in ranks)
    for allocated in answer["models"]:
        assert allocated["predicted_weight_bytes"] == allocated["weight_bytes"]
    assert store.calibration(MODEL) is None  # an engine without adapters is another one


REFUSED = {
    "another question": (["--slo=ttft=1,tpot=1"], "leave --slo out"),
    "no markdown": (["--output=x.txt"], "is not a .md file"),
    "cannot run": (["--model=mamba2-2.7b"], "planned but does not run"),
    "too large": (["--model=llama2-70b"], "this machine has"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, monkeypatch, capfd):
    args, cause = REFUSED[name]
    if name == "cannot run":  # nothing applies its layers
        monkeypatch.delitem(registry._MIXERS, Mamba2)
    ran = apps.call(plan, monkeypatch, capfd, "--verify", *args)
    assert ran.status == 1 and cause in ran.err and ran.err.count("\n") == 1
    assert not ran.out


def test_output_needs_verify(monkeypatch, capfd):
    ran = apps.call(plan, monkeypatch, capfd, "--output=x.md")
    assert ran.status == 1 and "--output needs --verify" in ran.err


def test_another_device_is_not_calibrated(monkeypatch):
    monkeypatch.setattr(plan_verify.jax, "default_backend", lambda: "gpu")
    with pytest.raises(InputError, match="this machine's processor, JAX computes on gpu"):
        plan_verify.check(MODEL)
