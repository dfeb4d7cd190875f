"""A calibration within seconds, on machines whose every constant and clock is known."""

import dataclasses
import math
import random

import pytest

from configs import presets
from configs.hardware.spec import HardwareSpec
from inference.planner.calibration import calibrate, quick
from inference.planner.calibration.calibrate import Sample
from inference.planner.calibration.verify import Point

SMOL = presets.get("smollm2-135m").config
RATES = {"bfloat16": 300e9}
TRUE = HardwareSpec(
    "cpu", 16e9, 30e9, RATES, overhead_s=5e-3, gamma=0.8, bandwidth_share=0.6, rate_share=0.5,
    half_rows=11.0, attention_share=0.3, cache_share=0.5,
)  # fmt: skip
PLAIN = HardwareSpec("cpu", 16e9, 30e9, RATES)
POINTS = [Point(SMOL, 1, 0, 64), Point(SMOL, 1, 0, 1024), Point(SMOL, 0, 1, 64),
          Point(SMOL, 0, 1, 1024)]  # fmt: skip


class Machine:
    """Its clock goes on by what steps take; now and then all of it is slower, and its probe shows
    that; `noise` slows single steps.
    """

    def __init__(self, slower=1.0, noise=0.0, drift=0.0):
        self.slower, self.noise, self.drift = slower, noise, drift
        self.rng, self.now, self.speed, self.runs = random.Random(1), 0.0, 1.0, []

    def run(self, point):
        self.runs.append(point)
        seconds = calibrate.predict(Sample(*point.sample, 1.0), TRUE) * self.slower / self.speed
        seconds *= math.exp(abs(self.rng.gauss(0, self.noise)))
        self.now += seconds
        return seconds

    def probe(self):
        if len(self.runs) % 4 == 0:
            self.speed = 1 - self.drift * self.rng.random()
        return 30e9 * self.speed

    def calibrated(self, points=POINTS):
        return quick.calibrated(PLAIN, points, self.run, self.probe, lambda: self.now)


def error(point, machine):
    seconds = calibrate.predict(Sample(*point.sample, 1.0), TRUE)
    return abs(calibrate.predict(Sample(*point.sample, seconds), machine) / seconds - 1)


@pytest.mark.parametrize("noise, drift, most", [(0.0, 0.0, 0.03), (0.0, 0.3, 0.1), (0.2, 0.0, 0.2)])
def test_steps_of_the_model_are_predicted(noise, drift, most):
    machine = Machine(noise=noise, drift=drift)
    found = machine.calibrated()
    assert found.is_calibrated and found.rates == RATES
    for point in (*POINTS, Point(SMOL, 1, 0, 300), Point(SMOL, 0, 1, 512)):
        assert error(point, found) < most, point
    assert error(POINTS[0], PLAIN) > 0.5  # what it is for


def test_a_time_is_the_least_of_at_least_three():
    machine = Machine()
    exact = machine.calibrated()
    assert [machine.runs.count(point) for point in POINTS] == [5] * 4  # the first is not counted

    class Hiccup(Machine):
        def run(self, point):
            return super().run(point) * (20 if len(self.runs) == 6 else 1)

    assert Hiccup().calibrated() == exact
    slow = Machine(slower=8)
    assert slow.calibrated().is_calibrated
    assert [slow.runs.count(point) for point in POINTS] == [4, 4, 0, 0]


def test_it_takes_no_longer_than_it_may():
    for slower in (1, 2, 4, 8, 12, 16, 18):
        machine = Machine(slower=slower)
        assert machine.calibrated().is_calibrated and machine.now < 1.6 * quick.SECONDS
    assert {*machine.runs} == {POINTS[0]}
    machine = Machine(slower=30)
    assert machine.calibrated() is None and machine.runs == POINTS[:1]


def test_nothing_to_time():
    assert Machine().calibrated([]) is None


def test_several_sizes_are_all_used():
    more = [*POINTS, *(dataclasses.replace(POINTS[0], rows=rows) for rows in (8, 32))]
    machine = Machine()
    found = machine.calibrated(more)
    assert {*machine.runs} == {*more}
    assert max(error(point, found) for point in more) < 0.05
