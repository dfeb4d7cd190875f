"""Calibration and its verdict, on machines whose every constant is known."""

import dataclasses
import json
import math
import random

import pytest

from configs import presets
from configs.hardware.spec import HardwareSpec
from inference.files import digests, local_machine
from inference.planner import weights
from inference.planner.calibration import calibrate, lookup, measure, store, verify
from inference.planner.calibration.calibrate import Sample
from inference.planner.cost import Precision

SMOL = presets.get("smollm2-135m").config
GEMMA = dataclasses.replace(presets.get("gemma3-270m").config, num_layers=6, vocab_size=32_768)
RATES = {"bfloat16": 300e9, "float32": 200e9}
PLAIN = HardwareSpec("cpu", 16e9, 30e9, RATES)
TRUE = dataclasses.replace(
    PLAIN, overhead_s=2e-4, gamma=0.8, bandwidth_share=0.6, rate_share=0.9, half_rows=11.0,
    attention_share=0.37,
)  # fmt: skip


class FakeRunner:
    """Steps that take what a machine of known constants needs, the noise of a shared one included:
    it now and then slows down as a whole, and its probe shows it.
    """

    def __init__(self, hardware, noise=0.0, drift=0.0):
        self.hardware, self.noise, self.drift = hardware, noise, drift
        self.rng, self.speed, self.runs = random.Random(1), 1.0, []

    def probe(self):
        if not len(self.runs) % 4:
            self.speed = 1 - self.drift * self.rng.random()
        return self.hardware.read_bandwidth * self.speed

    def run(self, point):
        self.runs.append(point)
        seconds = calibrate.predict(Sample(*point.sample, 1.0), self.hardware)
        return seconds / self.speed * math.exp(self.rng.gauss(0, self.noise))

    def held_bytes(self, model):
        formats = Precision.of(model)
        held = weights.weight_bytes(model, formats.weights, formats.rest)
        return int(held), verify.engine_config(model).pool_bytes


def run(runner, points, **settings):
    return verify.verify(PLAIN, points, runner, runner.probe, **settings)


@pytest.fixture(scope="module")
def points():
    return verify.points([SMOL, GEMMA])


@pytest.fixture(scope="module")
def exact(points):
    return run(FakeRunner(TRUE), points)


# --- points ---------------------------------------------------------------------------------------


def test_points_cover_rows_contexts_types_and_models(points):
    assert len(points) == len(set(points)) >= 24
    assert {p.model.name for p in points} == {"smollm2-135m", "gemma3-270m"}
    assert {p.model.dtype for p in points} == {"bfloat16", "float32"}
    assert {p.rows for p in points} == {0, 2, 8, 16, 32}
    assert {p.chunks for p in points} == {0, 1, 4, 8}
    assert {p.rows > 0 for p in points} == {True, False}
    assert max(p.context for p in points) <= verify.MAX_CONTEXT
    for point in points:
        config = verify.engine_config(point.model)
        assert point.rows in (0, *config.engine.decode_rows)
        assert point.chunks in (0, *config.engine.prefill_chunks)


def test_a_point_is_a_step():
    decoding = verify.Point(SMOL, 8, 0, 100)
    assert decoding.contexts == (100,) * 8 and decoding.shape.num_tokens == 8
    prompt = verify.Point(SMOL, 0, 4, 300)
    assert prompt.contexts == (108, 172, 236, 300) and prompt.shape.num_tokens == 256
    prompts = verify.Point(SMOL, 0, 4, 64)
    assert prompts.contexts == (64,) * 4


# --- fitting --------------------------------------------------------------------------------------


def test_known_constants_are_found(exact):
    assert exact.hardware.is_calibrated and not PLAIN.is_calibrated
    median, p90 = exact.errors()
    assert median < 0.01 and p90 < 0.03
    for name in ("bandwidth_share", "rate_share", "attention_share"):
        assert getattr(exact.hardware, name) == pytest.approx(getattr(TRUE, name), rel=0.1)
    plain = exact.errors(roofline=True)
    assert plain[0] > 0.3  # what the calibration is for


def test_the_same_run_gives_the_same_constants(points, exact):
    assert run(FakeRunner(TRUE), points) == exact


def test_noise_and_a_drifting_machine_stay_within_bounds(points):
    found = run(FakeRunner(TRUE, noise=0.1, drift=0.5), points)
    median, p90 = found.errors()
    assert median < 0.1 and p90 < 0.2
    low, high = found.bandwidths
    assert high / low > 1.5


def test_outliers_do_not_move_the_constants(points):
    samples = [Sample(*p.sample, 1.0) for p in points]
    samples = [dataclasses.replace(s, seconds=calibrate.predict(s, TRUE)) for s in samples]
    bad = [dataclasses.replace(s, seconds=3 * s.seconds) for s in samples[::9]]
    found = calibrate.fit(PLAIN, [*samples, *bad])
    errors = sorted(calibrate.error(s, found) for s in samples)
    assert errors[len(errors) // 2] < 0.03


def test_a_roofline_that_overlaps_is_found(points):
    """gamma near 0, no overhead, full rates: a machine for which the plain maximum holds."""
    found = run(FakeRunner(dataclasses.replace(PLAIN, gamma=1e-3)), points)
    assert found.errors()[1] < 0.05


# --- the verdict ----------------------------------------------------------------------------------


def test_half_is_held_out_and_alone_judges(exact, points):
    held_out = [r for r in exact.results if r.is_held_out]
    assert len(held_out) == len(points) // 2
    errors = sorted(abs(r.predicted_s / r.seconds - 1) for r in held_out)
    assert exact.errors()[1] == errors[math.ceil(0.9 * len(errors)) - 1]
    of_smol = exact.errors("smollm2-135m")
    assert of_smol != exact.errors("gemma3-270m")


def test_each_measurement_is_bracketed_and_the_order_random(points):
    class Logging(FakeRunner):
        log: list = []

        def probe(self):
            self.log.append("probe")
            return super().probe()

        def run(self, point):
            self.log.append(point)
            return super().run(point)

    runner = Logging(TRUE)
    few = points[::6]
    run(runner, few, rounds=2, repeats=2)
    rounds = [runner.log[i : i + 5] for i in range(0, len(runner.log), 5)]
    assert len(rounds) == 2 * len(few)
    for warm, before, *timed, after in rounds:
        assert before == after == "probe" and {warm, *timed} == {warm}
    orders = [each[0] for each in rounds]
    first, second = orders[: len(few)], orders[len(few) :]
    assert set(first) == set(second) == set(few) and first != second != few


def test_a_time_between_unsteady_readings_is_taken_again():
    class Script:
        readings, seconds = iter([30e9, 20e9, 21e9]), iter([9.0, 8.0, 4.0, 5.0])

        def run(self, point):
            return next(self.seconds)

        def probe(self):
            return next(self.readings)

    script = Script()
    point = verify.Point(SMOL, 2, 0, 64)
    found = verify._bracketed(point, script, script.probe, repeats=2)
    assert found == (4.0, 20e9)  # the best of two, the lower of two

    script.readings, script.seconds = iter([1.0, 2.0, 4.0, 8.0]), iter([3.0, 2.0, 1.0])
    assert verify._bracketed(point, script, script.probe, repeats=1) == (1.0, 4.0)  # no fourth try


def test_memory_is_compared_to_the_byte(exact):
    assert exact.is_exact_memory and len(exact.memory) == 4
    wrong = dataclasses.replace(exact.memory[0], allocated=(1, 2))
    assert not dataclasses.replace(exact, memory=(wrong,)).is_exact_memory


def test_plain_data_holds_every_figure(exact):
    found = json.loads(json.dumps(verify.as_json(exact)))
    assert len(found["rows"]) == len(exact.results)
    assert sum(row["held_out"] for row in found["rows"]) == len(exact.results) // 2
    assert (found["median_error"], found["p90_error"]) == exact.errors()
    assert found["memory"][0]["predicted_weight_bytes"] == found["memory"][0]["weight_bytes"]


# --- kept -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return tmp_path


def test_a_calibration_is_kept_by_machine(cache, monkeypatch):
    assert store.calibration() is None
    store.write(TRUE)
    assert store.calibration() == TRUE
    assert store.path().is_relative_to(cache)
    monkeypatch.setattr(local_machine, "processor", lambda: "another one")
    assert store.calibration() is None


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
        lambda text: json.dumps(json.loads(text) | {"attention_share": 0}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "half_rows"}),
    ],
)
def test_a_damaged_calibration_is_none(cache, damage):
    store.write(TRUE)
    path = store.path()
    text = digests.opened(path.read_bytes(), "kept")
    path.write_bytes(digests.sealed(damage(text)))
    assert store.calibration() is None


def test_a_cache_that_cannot_be_written_is_a_warning(cache, monkeypatch, caplog):
    (cache / "hardware").write_text("a file in the way")
    store.write(TRUE)
    assert "cannot keep" in caplog.text and store.calibration() is None


def test_a_calibrated_machine_is_as_slow_as_it_reads_now(cache, monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 15e9)
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e12)
    assert not lookup.this_machine("bfloat16").is_calibrated
    store.write(TRUE)
    slow = lookup.this_machine("bfloat16")
    assert slow.is_calibrated and slow.read_bandwidth == 15e9
    sample = Sample(*verify.Point(SMOL, 8, 0, 100).sample, 1.0)
    assert calibrate.predict(sample, slow) == pytest.approx(2 * calibrate.predict(sample, TRUE))
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 60e9)
    assert lookup.this_machine("bfloat16") == store.calibration()  # a passing moment
    assert not lookup.this_machine("float8").is_calibrated  # no rate of it was fitted
