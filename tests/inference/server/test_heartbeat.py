"""What an engine tells of itself, beside what it knows."""

import collections
import dataclasses
import types

import pytest

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference.planner.calibration import lookup, store
from inference.planner.simulate import Simulator
from inference.prefill.prefiller import Figures
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Status
from inference.server.client.engine_totals import EngineTotals
from inference.server.engine_process import pages, served_engine
from inference.server.engine_process.served_engine import ServedEngine
from inference.server.engine_process.step_figures import StepFigures
from inference.server.frames import ITERATION_TOKENS, Heartbeat
from scripts.reports import decode_report
from sharding import hosts
from tests import fakes

MACHINE = dataclasses.replace(catalog.get("h100"), gamma=0.5, overhead_s=1e-4)
MODELS = {"llama": fakes.llama, "windows": fakes.gemma, "states": fakes.hybrid}


def simulated(model, prompts, num_new=12):
    config = Config(model, EngineConfig(max_seqs=4))
    found = Simulator(config, Scheduler(config), MACHINE, host_s=1e-3)
    for prompt in prompts:
        found.add_request(prompt, SamplingParams(max_new_tokens=num_new))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_pages_are_told_as_they_are(name):
    shared = fakes.prompts([40])[0]
    engine = simulated(MODELS[name](), [shared + tail for tail in fakes.prompts([5, 9, 20])])
    (shard,) = engine.scheduler.shards
    found = []
    while engine.scheduler.has_work:
        engine.step()
        found.append(held := pages.page_use([shard], engine.config))
        groups = shard.pages.usage(shard.running)
        room, filled = (sum(each) for each in zip(*groups, strict=True))
        assert held.waste == pytest.approx(1 - filled / room if room else 0)
        lists = [sequence.pages[: len(groups)] for sequence in shard.running]
        listed = sum(page > 0 for each in lists for own in each for page in own)
        distinct = room // engine.config.page_tokens
        assert held.sharing == pytest.approx(1 - distinct / listed if listed else 0)
    assert max(each.waste for each in found) > 0
    if name == "llama":
        assert max(each.sharing for each in found) > 0.3
    assert found[-1].waste == found[-1].sharing == 0


def test_steps_are_counted_once_and_predicted_where_the_machine_is_calibrated():
    engine = simulated(fakes.llama(), fakes.prompts([70, 9]))
    figures = StepFigures(engine.config, MACHINE)
    while engine.scheduler.has_work:
        engine.step()
        if len(engine.records) == 5:
            figures.read(engine.records)
    figures.read(engine.records)
    counters, records = dict(figures.counters), list(engine.records)
    figures.read(engine.records)
    assert figures.counters == counters
    decoding = [record for record in records if not record.shape.prefill[0]]
    assert counters["decode_steps"] == len(decoding) and counters["prefill_steps"] > 0
    assert counters["decode_steps"] + counters["prefill_steps"] == len(records)
    tokens = [sum(queries for queries, _ in record.rows) for record in records]
    assert counters["step_tokens"] == sum(tokens)
    assert figures.iteration_tokens[1] == sum(1 < n <= ITERATION_TOKENS[1] for n in tokens) > 0
    assert sum(figures.iteration_tokens) == len(records)
    measured = sum(record.seconds for record in decoding)
    assert counters["decode_step_seconds"] == pytest.approx(measured)
    assert counters["predicted_decode_step_seconds"] == pytest.approx(measured)  # it ran as such
    reports = [decode_report.decode_steps(engine.config, [record], MACHINE) for record in decoding]
    assert counters["decode_step_bytes"] == pytest.approx(
        sum(r.step_bytes for r in reports), rel=1e-3
    )
    assert figures.read_bandwidth == MACHINE.read_bandwidth


@pytest.mark.parametrize("hardware", [None, dataclasses.replace(MACHINE, gamma=0.0)])
def test_nothing_is_predicted_for_a_machine_that_was_not_calibrated(hardware):
    engine = simulated(fakes.llama(), fakes.prompts([9]))
    figures = StepFigures(engine.config, hardware)
    while engine.scheduler.has_work:
        engine.step()
    figures.read(engine.records)
    assert "predicted_decode_step_seconds" not in figures.counters
    for name in ("decode_step_seconds", "decode_step_bytes"):
        assert figures.counters[name] > 0
    assert figures.read_bandwidth == (hardware and hardware.read_bandwidth)


class Simulated(Simulator):
    """As much of an engine as a heartbeat reads."""

    compile_s = 0.0
    prefill_figures = Figures()
    model_runner = types.SimpleNamespace(num_late_compiles=0, shapes=())


def served(max_seqs=2, **settings):
    config = Config(fakes.llama(), EngineConfig.of(max_seqs=max_seqs, **settings))
    engine = Simulated(config, Scheduler(config), MACHINE, host_s=1e-3)
    return engine, ServedEngine(engine, "tiny", lambda: None)


def test_a_calibration_is_of_the_model_and_what_runs_it(monkeypatch, tmp_path):
    model = fakes.llama()
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert lookup.cached(model, "mine") is None
    rates = HardwareSpec("cpu", 1e9, read_bandwidth=2e10, rates={"float32": 1e10})
    store.write(rates)
    store.write(dataclasses.replace(rates, gamma=0.5, implementations="others"), model)
    assert lookup.cached(model, "mine") == rates and not rates.is_calibrated
    own = dataclasses.replace(rates, gamma=0.25, implementations="mine")
    store.write(own, model)
    assert lookup.cached(model, "mine") == own and lookup.cached(model, "new") == rates


def test_waiting_is_told_with_its_time(monkeypatch):
    engine, one = served()
    monkeypatch.setattr(hosts.current(), "now", engine.clock.now)
    monkeypatch.setattr(served_engine, "time", types.SimpleNamespace(perf_counter=engine.clock.now))
    for prompt in fakes.prompts([8, 8, 8]):
        engine.add_request(prompt, SamplingParams(max_new_tokens=6))
    *_, third = engine.scheduler.waiting
    one.step()
    told = one.heartbeat()
    assert (told.num_running, told.num_waiting, told.num_deferred) == (2, 1, 0)
    assert told.oldest_waiting_s == engine.clock.now() > 0
    while third.status is Status.WAITING:
        started = engine.clock.now()
        one.step()
    assert third.queued_s == pytest.approx(started, abs=2e-3) and third.queued_s > 5e-3
    assert one.heartbeat().oldest_waiting_s == 0
    third.status, third.leader = Status.WAITING, third
    engine.scheduler.waiting.add(third)
    told = one.heartbeat()  # it ran before
    assert (told.num_waiting, told.num_deferred, told.oldest_waiting_s) == (1, 1, 0)


def test_accepted_drafts_are_counted_by_position():
    engine, one = served(num_drafts=3)
    engine.scheduler.counters.verified = collections.Counter({(3, 2): 5, (3, 0): 4, (1, 1): 2})
    told = one.heartbeat()
    assert told.accepted_per_position == [7, 5, 0] and told.counters["draft_rounds"] == 11
    assert told.counters["accepted_drafts"] == 12


def test_counts_go_on_where_an_engine_ends():
    totals = EngineTotals()
    totals.take(Heartbeat(1, 2, 0.5, {"steps": 3, "old": 1}, iteration_tokens=[1, 2]))
    assert totals.heartbeat.counters == {"steps": 3, "old": 1}
    totals.end()
    ended = totals.heartbeat
    assert (ended.num_running, ended.cache_used, ended.counters["steps"]) == (0, 0, 3)
    for count in (1, 2):
        told = Heartbeat(1, 0, 0.1, {"steps": count}, iteration_tokens=[count, 0, 4],
                         accepted_per_position=[count])  # fmt: skip
        totals.take(told)
        assert totals.heartbeat.counters == {"steps": 3 + count, "old": 1}
        assert totals.heartbeat.iteration_tokens == [1 + count, 2, 4]
        assert totals.heartbeat.accepted_per_position == [count]
    totals.end()
    totals.take(Heartbeat(counters={"steps": 1}))
    assert totals.heartbeat.counters["steps"] == 6
