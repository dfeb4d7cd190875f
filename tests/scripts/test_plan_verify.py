"""`python -m scripts.plan --verify` on tiny models: real steps, predicted and measured."""

import dataclasses
import json

import numpy as np
import pytest

from configs import presets
from configs.errors import InputError
from configs.kinds.recurrent.mamba import Mamba2
from inference.files import local_machine
from inference.planner.calibration import lookup, measure, store, verify
from layers import registry
from scripts import plan
from scripts.modes import plan_verify
from tests import fakes
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

# Of whole strips, so that packed weights have no padding.
MODEL = fakes.llama(max_context=verify.MAX_CONTEXT, width=32, vocab_size=144).with_kinds(width=32)
WINDOWED = dataclasses.replace(
    MODEL, name="windowed", pattern=(*MODEL.with_kinds(window=100).pattern, *MODEL.pattern)
)


@pytest.fixture
def tiny(monkeypatch, tmp_path, no_draws):
    """Few points of tiny models, a small cache, and a cheap probe."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_verify, "CUT_GEMMA", WINDOWED)
    monkeypatch.setattr(verify, "_DECODE", ((8, 64), (8, 300)))
    monkeypatch.setattr(verify, "_PREFILL", ((4, 64), (4, 300)))
    monkeypatch.setattr(verify, "_CACHE_BYTES", 2 << 20)
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e11)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(measure.Probe, "read", lambda self: 1e10)
    monkeypatch.setattr(plan_verify.compilation_cache, "enable", lambda: None)
    monkeypatch.setitem(presets.NAMES, "tiny", presets.Preset(MODEL, None))
    return tmp_path


def test_every_row_reads_and_writes_pages_of_its_own(tiny):
    runner = plan_verify.EngineRunner()
    for point in (verify.Point(WINDOWED, 8, 0, 300), verify.Point(WINDOWED, 0, 4, 64)):
        runner.prepare(point)
        num_tokens, arrays = runner._arrays[point]
        for group, table in zip(WINDOWED.page_groups, arrays.tables, strict=True):
            held = table[table > 0]
            assert len(held) == len(set(held))
            live = point.context - group.spec.live_from(num_tokens[0])
            assert len(held) >= len(table) * live // 16
        assert list(arrays.query_length_Y) == [1 if point.rows else 64] * len(table)
    one_prompt = verify.Point(WINDOWED, 0, 4, 300)
    runner.prepare(one_prompt)
    num_tokens, arrays = runner._arrays[one_prompt]
    assert num_tokens[0] == 300 - 256 and list(arrays.query_start_Y) == [0, 64, 128, 192]
    assert (arrays.tables[1] == arrays.tables[1][0]).all()
    runner = runner._runners[WINDOWED]
    assert np.asarray(runner.slots.num_tokens)[0] == 300  # the step has run


def test_the_page_and_the_calibration(tiny, monkeypatch, capfd):
    page = tiny / "verify.md"
    call = ("--model=tiny", "--verify", f"--output={page}", "--json")
    ran = apps.call(plan, monkeypatch, capfd, *call)
    assert ran.status == 0, ran.err
    answer = json.loads(ran.out)
    assert len(answer["rows"]) == 4 + 3 * 2  # every size of the first, every other of the rest
    assert sum(row["held_out"] for row in answer["rows"]) == 5
    for row in answer["rows"]:
        assert row["measured_s"] > 0 and row["predicted_s"] > 0 and row["roofline_s"] > 0
    assert len(answer["memory"]) == 4
    for held in answer["memory"]:
        assert held["predicted_weight_bytes"] == held["weight_bytes"]
        assert held["predicted_cache_bytes"] == held["cache_bytes"]
    assert answer["median_error"] <= answer["p90_error"]
    assert answer["processor"] and answer["cores"] == local_machine.num_cores()
    text = page.read_text()
    assert "median error **" in text and text.count("| windowed |") == 4 + 2
    kept = store.calibration()
    assert kept is not None and kept.is_calibrated
    assert lookup.get("cpu") == kept
    assert lookup.this_machine("bfloat16").is_calibrated


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
