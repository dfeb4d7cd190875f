"""Calibration and its verdict, on machines whose every constant is known."""

import dataclasses
import json
import math
import random

import pytest

from configs import presets
from configs.hardware.spec import HardwareSpec
from inference.files import digests, local_machine
from inference.planner.calibration import calibrate, lookup, measure, quick, store, verify
from inference.planner.calibration.calibrate import Sample
from inference.planner.calibration.verify import Point
from scripts.reports import verify_text

MODEL = presets.get("qwen2.5-0.5b").config
PLAIN = HardwareSpec("cpu", 16e9, 30e9, {"bfloat16": 300e9})
TRUE = dataclasses.replace(
    PLAIN, overhead_s=2e-4, gamma=0.8, bandwidth_share=0.6, rate_share=0.9, half_rows=3.0,
    attention_share=0.37, cache_share=0.7,
)  # fmt: skip
# As `first_start.prepared` has them.
TIMED = [
    Point(MODEL, 2, 0, 64), Point(MODEL, 0, 1, 64), Point(MODEL, 32, 0, 64),
    Point(MODEL, 0, 1, 3072), Point(MODEL, 8, 0, 3072), Point(MODEL, 8, 0, 64),
    Point(MODEL, 2, 0, 3072), Point(MODEL, 32, 0, 768),
]  # fmt: skip


class FakeRunner:
    """Steps that take what a machine of known constants needs, the noise of a shared one included:
    some of them, and some readings of the bandwidth, take longer.
    """

    def __init__(self, hardware, noise=0.0):
        self.hardware, self.rng, self.runs, self.now = hardware, random.Random(2), [], 0.0
        self.noise = noise

    def slower(self):
        return 1 + self.noise * self.rng.random() * self.rng.randrange(2)

    def probe(self):
        return self.hardware.read_bandwidth / self.slower()

    def run(self, point):
        self.runs.append(point)
        seconds = calibrate.predict(Sample(*point.sample, 1.0), self.hardware) * self.slower()
        self.now += seconds / 10
        return seconds

    def calibrated(self):
        hardware = dataclasses.replace(PLAIN, read_bandwidth=self.probe())
        return quick.calibrated(hardware, TIMED, self.run, self.probe, lambda: self.now)

    def held_bytes(self):
        return verify.predicted_bytes(MODEL)


@pytest.fixture(scope="module")
def exact():
    return verify.verify(MODEL, FakeRunner(TRUE))


# --- points ---------------------------------------------------------------------------------------


def test_points_cover_rows_contexts_and_prompts():
    points = verify.points(MODEL)
    assert len(points) == len(set(points)) == 18 and not {*points} & {*TIMED}
    config = verify.engine_config(MODEL)
    assert {p.rows for p in points} == {0, 1, 2, 8, 32}
    assert {p.chunks for p in points} <= {0, *config.engine.shapes.prefill_chunks}
    for rows in (1, 2, 8, 32):
        assert {p.context for p in points if p.rows == rows} == {512, 4096, 16_384}
    assert max(p.context for p in points) == config.max_context
    assert config.pool_bytes >= config.full_bytes(32)
    short = dataclasses.replace(MODEL, max_context=4096)
    assert {p.context for p in verify.points(short) if p.rows} == {512, 4096}


def test_a_point_is_a_step():
    decoding = Point(MODEL, 8, 0, 100)
    assert decoding.contexts == (100,) * 8 and decoding.shape.num_tokens == 8
    prompt = Point(MODEL, 0, 4, 300)
    assert prompt.contexts == (108, 172, 236, 300) and prompt.shape.num_tokens == 256
    prompts = Point(MODEL, 0, 4, 64)
    assert prompts.contexts == (64,) * 4


# --- fitting --------------------------------------------------------------------------------------


def test_steps_of_other_sizes_are_predicted(exact):
    """The constants may be others than the machine's: some stand in for each other."""
    assert not PLAIN.is_calibrated and all(machine.is_calibrated for machine in exact.hardware)
    median, largest = verify_text.errors(exact.results)
    assert median < 0.015 and largest < 0.03
    assert verify_text.errors(exact.results, roofline=True)[0] > 0.3  # what the calibration is for


def test_the_same_run_gives_the_same_constants(exact):
    assert len({machine.gamma for machine in exact.hardware}) == 1
    assert verify.verify(MODEL, FakeRunner(TRUE), rounds=1).hardware == exact.hardware[:1]


@pytest.mark.parametrize("cache_share", [0.2, 1.5])
def test_what_decoding_and_what_prompts_wait_for_are_apart(cache_share):
    """Attention that reads well computes badly, or the other way round."""
    true = dataclasses.replace(TRUE, cache_share=cache_share)
    found = verify.verify(MODEL, FakeRunner(true), rounds=1)
    assert verify_text.errors(found.results)[1] < 0.1


def test_neighbours_that_slow_every_other_step_are_seen_past(exact):
    found = verify.verify(MODEL, FakeRunner(TRUE, noise=1.0))
    median, largest = verify_text.errors(found.results)
    assert median < 0.08 and largest < 0.25
    assert max(result.spread for result in found.results) < 1.3
    for quiet, result in zip(exact.results, found.results, strict=True):
        assert result.point == quiet.point and 1 <= result.seconds / quiet.seconds < 1.3


def test_outliers_do_not_move_the_constants():
    samples = [Sample(*p.sample, 1.0) for p in [*TIMED, *verify.points(MODEL)]]
    samples = [dataclasses.replace(s, seconds=calibrate.predict(s, TRUE)) for s in samples]
    bad = [dataclasses.replace(s, seconds=3 * s.seconds) for s in samples[::9]]
    found = calibrate.fit(PLAIN, [*samples, *bad])
    errors = sorted(abs(calibrate.predict(s, found) / s.seconds - 1) for s in samples)
    assert errors[len(errors) // 2] < 0.03


# --- the verdict ----------------------------------------------------------------------------------


def test_each_round_calibrates_and_times_in_a_random_order():
    runner = FakeRunner(TRUE)
    calibrations = []

    def calibrated():
        calibrations.append(len(runner.runs))
        return TRUE

    runner.calibrated = calibrated
    found = verify.verify(MODEL, runner, rounds=2)
    half = len(runner.runs) // 2
    assert calibrations == [0, half]
    orders = [runner.runs[:half], runner.runs[half:]]
    assert orders[0] != orders[1] and {*orders[0]} == {*orders[1]} == {*verify.points(MODEL)}
    assert all(order[::2] == order[1::2] for order in orders)  # the better of two
    assert all(result.error == pytest.approx(0) for result in found.results)


def test_steps_that_are_too_slow_have_no_verdict():
    runner = FakeRunner(TRUE)
    runner.calibrated = lambda: None
    assert verify.verify(MODEL, runner) is None


def test_plain_data_holds_every_figure(exact):
    read_back = json.loads(json.dumps(verify_text.as_json([exact, exact])))
    assert len(read_back["rows"]) == 2 * len(exact.results)
    assert (read_back["median_error"], read_back["largest_error"]) == verify_text.errors(
        exact.results
    )
    (held, _) = read_back["models"]
    assert held["predicted_weight_bytes"] == held["weight_bytes"] == exact.allocated_bytes[0]
    assert held["weights"] == "bfloat16" and len(held["hardware"]) == 3


# --- kept -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return tmp_path


def test_a_calibration_is_kept_by_machine(cache, monkeypatch):
    assert store.calibration(MODEL) is None
    store.write(TRUE, MODEL)
    assert store.calibration(MODEL) == TRUE
    assert store.path(MODEL).is_relative_to(cache)
    monkeypatch.setattr(local_machine, "processor", lambda: "another one")
    assert store.calibration(MODEL) is None


def test_a_calibration_of_an_older_version_is_none(cache, monkeypatch):
    """Nothing is said of it: its file has another name."""
    with monkeypatch.context() as before:
        before.setattr(store, "_VERSION", store._VERSION - 1)
        store.write(TRUE, MODEL)
        assert store.calibration(MODEL) == TRUE
    assert store.calibration(MODEL) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-5],
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"gamma": "1"}),
        lambda text: json.dumps(json.loads(text) | {"gamma": 10**400}),
        lambda text: json.dumps(json.loads(text) | {"rates": [3]}),
        lambda text: json.dumps(json.loads(text) | {"rates": {"bfloat16": -1.0}}),
        lambda text: json.dumps(json.loads(text) | {"read_bandwidth": math.nan}),
        lambda text: json.dumps(json.loads(text) | {"cache_share": 0}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "half_rows"}),
    ],
)
def test_a_damaged_calibration_is_none(cache, damage):
    store.write(TRUE, MODEL)
    path = store.path(MODEL)
    text = digests.opened(path.read_bytes(), "kept")
    path.write_bytes(digests.sealed(damage(text)))
    assert store.calibration(MODEL) is None


def test_a_cache_that_cannot_be_written_is_a_warning(cache, monkeypatch, caplog):
    (cache / "hardware").write_text("a file in the way")
    store.write(TRUE, MODEL)
    assert "cannot keep" in caplog.text and store.calibration(MODEL) is None


def test_a_calibrated_machine_is_as_slow_as_it_reads_now(cache, monkeypatch):
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e12)
    reading = 30e9 / (2 * lookup.SCATTER)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: reading)
    assert not lookup.this_machine("bfloat16", model=MODEL).is_calibrated
    store.write(TRUE, MODEL)
    slow = lookup.this_machine("bfloat16", model=MODEL)
    assert slow.is_calibrated and slow.read_bandwidth == pytest.approx(15e9)
    sample = Sample(*Point(MODEL, 8, 0, 100).sample, 1.0)
    assert calibrate.predict(sample, slow) == pytest.approx(2 * calibrate.predict(sample, TRUE))
    for passing in (60e9, 27e9):  # a moment; and what readings scatter by
        monkeypatch.setattr(measure, "read_bandwidth", lambda passing=passing: passing)
        assert lookup.this_machine("bfloat16", model=MODEL) == TRUE
    assert not lookup.this_machine("float8", model=MODEL).is_calibrated  # no rate of it was fitted
