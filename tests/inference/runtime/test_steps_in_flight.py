"""When the next step is scheduled while one runs, on a clock of the test's own."""

import types

import pytest

from inference.runtime import steps_in_flight
from inference.runtime.steps_in_flight import StepsInFlight
from inference.scheduling.step_schedule import ScheduledChunk, ShardSchedule, StepSchedule
from inference.scheduling.step_shapes import StepShape
from inference.server.engine_process.served_engine import ServedEngine
from tests import fakes

pytestmark = pytest.mark.quick_code

LAUNCH_S, LOOK_S = 0.001, 0.002
SHAPE = StepShape((8, 1), (1, 64))


class Device:
    """Runner, scheduler and clock: a step takes `step_s` once those before it are done."""

    config = draft_policy = None
    choosing = ()
    has_work = True

    def __init__(self, step_s: float):
        self.now, self.step_s, self.idle_s, self.busy_until = 0.0, step_s, 0.0, 0.0
        self.shape, self.num_tokens, self.schedule_s = SHAPE, 64, 0.002

    def perf_counter(self) -> float:
        return self.now

    def schedule(self, now, is_open):
        self.now += self.schedule_s
        chunk = ScheduledChunk(None, 0, 0, 0, self.num_tokens, emits=False)
        return StepSchedule(self.shape, (ShardSchedule(prefill=(chunk,)),))

    def is_ready(self, schedule):
        return True

    def launch(self, schedule, inputs):
        self.now += LAUNCH_S
        self.idle_s = max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.now, self.busy_until) + self.step_s
        return self.busy_until  # what is its output here

    def is_done(self, output):
        return self.now >= output

    def wait(self, output):
        self.now = max(self.now, output)


@pytest.fixture
def make(monkeypatch):
    def made(step_s):
        device = Device(step_s)
        monkeypatch.setattr(steps_in_flight, "time", device)
        monkeypatch.setattr(steps_in_flight, "batch", types.SimpleNamespace(build=lambda *_: None))
        return device, StepsInFlight(device, device)

    return made


def turn(device, steps) -> float:
    """Waits, launches a step, and commits the one before it; how long it waited."""
    start = device.now
    while slack_s := steps.slack_s():
        device.now += min(slack_s, LOOK_S)
    waited_s = device.now - start
    steps.note_done()
    steps.launch(is_open=True)
    if len(steps) > 1:
        step, _ = steps.fetch()
        steps.record(step)
    steps.look_away()
    return waited_s


def test_a_step_is_scheduled_shortly_before_the_one_that_runs_should_end(make):
    device, steps = make(0.05)
    waited = [turn(device, steps) for _ in range(12)]
    assert waited[:2] == [0.0, 0.0]  # nothing ran, or nobody knew how long that takes
    assert all(0.04 < waited_s < 0.05 - device.schedule_s - LAUNCH_S for waited_s in waited[3:])
    assert device.idle_s == 0
    assert [round(record.seconds, 6) for record in steps.records][2:] == [0.05] * 9


def test_a_step_that_is_faster_than_it_was_is_noticed(make):
    device, steps = make(0.05)
    for _ in range(5):
        turn(device, steps)
    device.step_s = 0.01
    for _ in range(3):
        turn(device, steps)
        assert device.idle_s <= LOOK_S + device.schedule_s + LAUNCH_S
    assert max(steps.records[-1].seconds, steps.records[-2].seconds) < 0.01 + LOOK_S
    turn(device, steps)
    assert device.idle_s == 0


def test_fewer_tokens_are_expected_to_take_less(make):
    """In proportion: it may be less than they take, so the device does not wait for the host."""
    device, steps = make(0.1)
    for _ in range(5):
        turn(device, steps)
    device.num_tokens, device.step_s = 32, 0.06
    for _ in range(3):
        turn(device, steps)
        assert device.idle_s == 0
    device.num_tokens, device.step_s = 64, 0.1  # and of more tokens at least as much
    assert turn(device, steps) > 0.03 and turn(device, steps) > 0.04 and device.idle_s == 0


def test_a_short_step_waits_for_nobody(make):
    device, steps = make(0.01)
    assert not any(turn(device, steps) for _ in range(12)) and device.idle_s == 0


def test_a_shape_that_never_ran_does_not_wait(make):
    device, steps = make(0.05)
    for _ in range(5):
        turn(device, steps)
    device.shape = StepShape((8, 1), (2, 64))
    assert turn(device, steps) > 0
    assert turn(device, steps) == 0


def test_an_engine_waits_where_requests_could_start(monkeypatch):
    engine = fakes.engine(fakes.llama(max_context=64), max_seqs=2)
    served = ServedEngine(engine, "it", lambda: None)
    assert engine.slack_s() == 0  # nothing runs
    engine.add_request([1, 2, 3], fakes.greedy(20))
    for _ in range(4):
        engine.step()
    recent = dict.fromkeys(engine.scheduler.shapes, [(1, 100.0)])
    monkeypatch.setattr(engine._steps, "_recent", recent)
    monkeypatch.setattr(engine.model_runner, "is_done", lambda output: False)
    assert 50 < engine.slack_s() < 100 and 50 < served.slack_s() < 100
    with monkeypatch.context() as patch:
        patch.setattr(engine._steps, "waiting", engine._steps._steps[0])
        assert engine.slack_s() == 0
    monkeypatch.setattr(engine.scheduler.shards[0], "free_slots", [])
    assert engine.slack_s() == 0
    monkeypatch.undo()
    engine.rebuild()
    assert engine.slack_s() == 0


def test_where_the_host_is_slow_it_begins_earlier(make):
    device, steps = make(0.05)
    for _ in range(5):
        usual_s = turn(device, steps)
    device.schedule_s += 0.018
    turn(device, steps)
    assert turn(device, steps) < usual_s - 0.018 and device.idle_s == 0
