"""Workloads as requests, the driver against a server whose times are known, figures by hand, the
simulation against the engine, the ablations.
"""

import dataclasses
import itertools
import json
from collections import deque

import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.workload import Fixed, LogNormal, Uniform, Workload
from inference.benchmark import ablation, drive, host_cost, measure, metrics, requests
from inference.benchmark.interference import Interference
from inference.benchmark.metrics import SloTargets
from inference.benchmark.requests import TimedRequest
from inference.outputs import RequestOutput
from inference.planner.simulate import Simulator, VirtualClock
from inference.scheduling.admission_control import AdmissionControl
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.step_schedule import Counters
from inference.scheduling.step_shapes import enumerate_shapes
from tests import fakes

CHIP = HardwareSpec("chip", 1e9, 1e9, {"float32": 1e10}, overhead_s=1e-3)


# --- requests -------------------------------------------------------------------------------------

POISSON = Workload(
    "poisson", 400, rate=5.0, prompt=Uniform(3, 30), output=LogNormal(8, 1.0), prefix_tokens=20,
    prefix_share=0.25, seed=7,
)  # fmt: skip
DRAWN = 1000, 10_000  # the vocabulary and the longest request


def test_one_seed_gives_the_same_requests():
    first, again = requests.generate(POISSON, *DRAWN), requests.generate(POISSON, *DRAWN)
    assert first == again
    assert first != requests.generate(dataclasses.replace(POISSON, seed=8), *DRAWN)
    assert all(2 <= token < 1000 for each in first for token in each.prompt)
    # Another rate, or none, changes when requests come and nothing else.
    faster = requests.generate(dataclasses.replace(POISSON, rate=50.0), *DRAWN)
    closed = requests.generate(dataclasses.replace(POISSON, kind="closed", rate=None), *DRAWN)
    for one, two, three in zip(first, faster, closed, strict=True):
        assert one.prompt == two.prompt == three.prompt
        assert one.num_new_tokens == two.num_new_tokens == three.num_new_tokens
        assert one.arrival_s == pytest.approx(10 * two.arrival_s) and three.arrival_s == 0


def test_arrivals_and_shared_prefixes():
    found = requests.generate(POISSON, *DRAWN)
    assert found[0].arrival_s == 0
    assert found[-1].arrival_s == pytest.approx(400 / 5.0, rel=0.1)
    heads = [each.prompt[:20] for each in found if len(each.prompt) >= 20]
    common = max(set(heads), key=heads.count)
    assert heads.count(common) == 100


_GOOD = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3}


def test_what_does_not_fit_is_refused_before_a_token_is_drawn(monkeypatch):
    monkeypatch.setattr(requests, "random_tokens", None)
    long = Workload("closed", 9, prompt=Uniform(999_000, 999_999), output=Fixed(64))
    with pytest.raises(InputError, match="^a prompt of 999... tokens and 64 new ones grow to"):
        requests.generate(long, 1000, 8192)


def test_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        _GOOD | {"arrival_s": 2.5},
        {"arrival_s": 0, "prompt": "two words", "output_tokens": 1},
        {"arrival_s": 1, "token_ids": [3, 9], "output_tokens": 2},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    lines = requests.read_trace(str(path))
    found = requests.from_trace(lines, 61, 99, lambda text: [5, 6], seed=1)
    assert [each.arrival_s for each in found] == [0, 1, 2.5]
    assert [each.num_new_tokens for each in found] == [1, 2, 3]
    assert found[0].prompt == (5, 6) and found[1].prompt == (3, 9) and len(found[2].prompt) == 5
    assert len(requests.read_trace(str(path), limit=2)) == 2


@pytest.mark.parametrize(
    "line, message",
    [
        ("{'arrival_s': 1}", "line 2 is not JSON: Expecting property name"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", 'line 2 is not {"arrival_s": seconds'),
        (json.dumps({"arrival_s": 1, "output_tokens": 1}), "line 2 is not"),
        (json.dumps(_GOOD | {"prompt": "A"}), "line 2 is not"),
        (json.dumps(_GOOD | {"user": 1}), "line 2: 'user' is not one of prompt_tokens, prompt"),
        (json.dumps(_GOOD | {"arrival_s": -1}), "line 2: 'arrival_s' is a number of seconds from"),
        (json.dumps(_GOOD | {"arrival_s": "1"}), "line 2: 'arrival_s'"),
        (json.dumps(_GOOD | {"arrival_s": True}), "line 2: 'arrival_s'"),
        (json.dumps(_GOOD | {"arrival_s": float("nan")}), "line 2: 'arrival_s'"),
        (json.dumps(_GOOD | {"arrival_s": 10**400}), "line 2: 'arrival_s'"),
        (json.dumps({"prompt_tokens": 5, "output_tokens": 3}), "'arrival_s' .* not None"),
        (json.dumps(_GOOD | {"output_tokens": 0}), "line 2: 'output_tokens' is a whole number"),
        (json.dumps(_GOOD | {"output_tokens": 1.5}), "line 2: 'output_tokens'"),
        (json.dumps(_GOOD | {"prompt_tokens": True}), "line 2: 'prompt_tokens'"),
        ('{"arrival_s": 1, "output_tokens": 1, "prompt": ""}', "line 2: 'prompt' is a text"),
        ('{"arrival_s": 1, "output_tokens": 1, "prompt": "\\ud83d"}', "line 2: 'prompt' is a text"),
        ('{"arrival_s": 1, "output_tokens": 1, "token_ids": []}', "line 2: 'token_ids' is a list"),
        ('{"arrival_s": 1, "output_tokens": 1, "token_ids": [1.5]}', "line 2: 'token_ids'"),
        ('{"arrival_s": 1, "output_tokens": 1, "token_ids": [61]}', "line 2: token id 61; a promp"),
        ('{"arrival_s": 1, "output_tokens": 1, "token_ids": [-1]}', "line 2: token id -1"),
        (json.dumps(_GOOD | {"prompt_tokens": 98}), "line 2: a prompt of 98 .* grow to 101 tokens"),
    ],
)
def test_lines_that_are_no_request(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(_GOOD) + "\n" + line)
    with pytest.raises(InputError, match=message):
        requests.from_trace(requests.read_trace(str(path)), 61, 99, lambda text: [], seed=0)


def test_traces_that_are_none(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(InputError, match="no line holds a request"):
        requests.read_trace(str(empty))
    for name in (str(tmp_path), str(tmp_path / "missing.jsonl"), "a\0b"):
        with pytest.raises(InputError, match="cannot read"):
            requests.read_trace(name)
    empty.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not UTF-8: byte 0"):
        requests.read_trace(str(empty))


# --- the driver -----------------------------------------------------------------------------------


class Metronome:
    """A server that gives every request a token each second; two run at a time, the first waits for
    a second where more are to come.
    """

    def __init__(self):
        self.clock, self.counters, self.records = VirtualClock(), Counters(), deque()
        self.waiting, self.running, self.open_seen = [], [], []
        self.scheduler, self.shards = self, [self]

    def usage(self):
        return tuple(n * len(self.running) for n in (4, 3, 10, 6))

    def add_request(self, prompt, params):
        self.waiting.append([len(self.open_seen), prompt[0], params.max_new_tokens])
        self.counters.num_prompt_tokens += len(prompt)
        return prompt[0]

    def step(self, is_open=False):
        self.open_seen.append(is_open)
        if not self.running and len(self.waiting) < 2 and is_open:
            return []
        while self.waiting and len(self.running) < 2:
            self.running.append(self.waiting.pop(0))
        self.clock.sleep(1.0)
        self.counters.num_steps += 1
        self.records.append(dataclasses.make_dataclass("R", ["host_s"])(0.25))
        outputs = []
        for one in list(self.running):
            one[2] -= 1
            reason = None if one[2] else "length"
            outputs.append(RequestOutput(one[1], [one[1]], "", reason))
            if not one[2]:
                self.running.remove(one)
        return outputs


def _metronome(*timed, concurrency=None):
    server, ended = Metronome(), []
    load = [TimedRequest(at, (id, id), new) for id, (at, new) in enumerate(timed)]
    run = drive.drive(server, load, server.clock, concurrency, on_progress=ended.append)
    return run, server, ended


def test_requests_are_served_from_their_arrival_on():
    run, server, ended = _metronome((0.0, 2), (1.5, 3), (1.6, 1), (20.0, 1))
    times = [(each.arrival_s, *(round(t, 2) for t in each.token_s)) for each in run.requests]
    # The first waits for a second one; the third, who came during a step, for a place; then nothing
    # happens until the fourth.
    assert times == [(0.0, 2.5, 3.5), (1.5, 2.5, 3.5, 4.5), (1.6, 4.5), (20.0, 21.0)]
    assert ended == [1, 2, 3, 4] or ended == [1, 3, 3, 4]
    assert run.seconds == pytest.approx(21.0) and run.num_new_tokens == 7
    assert run.counters["num_steps"] == 4 and run.counters["num_prompt_tokens"] == 8
    assert len(run.records) == 4 and not server.records
    assert server.open_seen[0] and not server.open_seen[-1]
    assert [each.token_ids for each in run.requests] == [[0, 0], [1, 1, 1], [2], [3]]


def test_a_closed_workload_sends_the_next_as_one_ends():
    run, server, _ = _metronome((0.0, 3), (0.0, 1), (0.0, 2), concurrency=2)
    assert [each.arrival_s for each in run.requests] == [0, 0, 1]
    assert [each.token_s for each in run.requests] == [[1, 2, 3], [1], [2, 3]]
    # Who waits for a place comes only as another ends: no batch may wait for it.
    assert not any(server.open_seen)


def test_figures_by_hand():
    run, _, _ = _metronome((0.0, 3), (0.0, 1), (0.0, 2), concurrency=2)
    found = metrics.figures(run, SloTargets(ttft_s=1.0))
    assert found["seconds"] == 3 and found["output_tok_s"] == 2 and found["requests_s"] == 1
    assert found["ttft_mean_s"] == found["ttft_p99_s"] == 1
    assert found["itl_p50_s"] == found["tpot_mean_s"] == 1
    assert found["e2e_mean_s"] == 2 and found["e2e_p50_s"] == 2 and found["e2e_p90_s"] == 3
    assert found["goodput_share"] == 1 and found["goodput_requests_s"] == 1
    assert found["kv_waste"] == pytest.approx(0.4) and "kv_waste_0" not in found
    groups = [dataclasses.replace(each, num_allocated=(8, 2), num_written=(2, 2))
              for each in run.usage]  # fmt: skip
    found |= metrics.figures(dataclasses.replace(run, usage=groups), SloTargets(ttft_s=1.0))
    assert (found["kv_waste"], found["kv_waste_0"], found["kv_waste_1"]) == (0.6, 0.75, 0.0)
    counts = zip(run.usage, (1, 5, 2), strict=True)
    crowds = [dataclasses.replace(each, num_running=count) for each, count in counts]
    found |= metrics.figures(dataclasses.replace(run, usage=crowds), SloTargets(ttft_s=1.0))
    assert (found["running_p50"], found["running_peak"]) == (2, 5)
    assert found["prompt_sharing"] == pytest.approx(0.25)
    assert found["host_step_s"] == 0.25 and found["steps"] == 3 and found["hit_rate"] == 0
    assert metrics.figures(run, SloTargets(itl_s=0.5))["goodput_share"] == pytest.approx(1 / 3)
    assert metrics.medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}]) == {"a": 2.0}
    run.requests[0].finish_reason = "error"
    with pytest.raises(InputError, match="non-finite logits"):
        metrics.figures(run)


def test_quantiles_and_slo_targets():
    values = list(range(1, 101))
    assert [metrics.quantile(values, share) for share in (0.5, 0.9, 0.99, 1)] == [50, 90, 99, 100]
    assert metrics.quantile([], 0.5) == 0 and metrics.quantile([3.0], 0.01) == 3
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="slo_itl_s is a number of seconds above 0"):
            SloTargets(itl_s=limit)


# --- the simulation -------------------------------------------------------------------------------


def _engine():
    """Too little memory for all that may run: sequences are preempted."""
    return fakes.engine(
        fakes.fake_model(), None, "one", False, max_seqs=8, max_context=52, page_tokens=4,
        cache_bytes=1_700, decode_rows=(8,), prefill_chunks=(2,), chunk_tokens=8,
    )  # fmt: skip


@pytest.mark.quick_code
def test_the_simulation_plans_what_the_engine_runs(monkeypatch):
    monkeypatch.setattr(AdmissionControl, "will_fit", lambda *who: True)  # so that memory runs out
    engine = _engine()
    load = requests.generate(
        Workload("closed", 7, prompt=Uniform(2, 20), output=Uniform(8, 30)), fakes.VOCAB, 52
    )
    run = drive.drive(engine, load, drive.WallClock())
    simulator = Simulator(engine.config, Scheduler(engine.config), CHIP, host_s=1e-3)
    simulator.scheduler.shapes = engine.scheduler.shapes
    plans, schedule = [None], simulator.scheduler.schedule
    told = lambda *when: plans.append(schedule(*when)) or plans[-1]  # noqa: E731
    monkeypatch.setattr(simulator.scheduler, "schedule", told)
    expected = drive.drive(simulator, load, simulator.clock)
    assert [step.rows for step in expected.records] == [step.rows for step in run.records]
    assert expected.counters == run.counters and run.counters["num_preemptions"] > 0
    assert [len(each.token_s) for each in expected.requests] == [n.num_new_tokens for n in load]
    assert run.requests[0].token_ids == fakes.continuation(load[0].prompt, load[0].num_new_tokens)
    # Every step takes its overhead at least; one has nothing to hide the host behind where no step
    # is in flight: the first, and after a wait for the token of somebody who was preempted.
    assert all(step.seconds > 1e-3 for step in expected.records)
    num_shown = sum(a is None and b is not None for a, b in itertools.pairwise(plans))
    busy = sum(step.seconds for step in expected.records)
    assert expected.seconds == pytest.approx(1e-3 * num_shown + busy)


def test_overlap_hides_the_host():
    seconds = []
    for overlap in (False, True):
        config = Config(fakes.fake_model(), EngineConfig.of(max_seqs=4, overlap=overlap))
        load = [TimedRequest(0.0, (1, 2, 3), 20)]
        run = measure.predict(config, load, CHIP, host_s=0.5e-3)
        seconds.append(run.seconds)
    assert seconds[0] - seconds[1] == pytest.approx(20 * 0.5e-3, rel=0.1)


@pytest.mark.quick_code
def test_runs_begin_with_an_empty_cache():
    load = [TimedRequest(0.0, tuple(range(1, 40)), 2)] * 2
    first, second = measure.measure(_engine(), load, repeats=2)
    assert first.counters == second.counters
    assert measure.figures([first, second])["output_tok_s"] > 0


# --- ablations and probes -------------------------------------------------------------------------


def _load(num_requests=12, rate=2.0):
    return requests.generate(
        Workload("poisson", num_requests, rate=rate, prompt=Uniform(5, 40), output=Uniform(5, 30),
                 prefix_tokens=30, prefix_share=0.5), 131, 999,
    )  # fmt: skip


def test_ablations_change_one_thing_each():
    model, load = fakes.llama(), _load()
    ablations = ablation.ablations(model, EngineConfig.of(chunk_tokens=8), load)
    over = {each.name: each.over for each in ablations}
    assert over == {
        "naive": None, "cached": "naive", "static": "cached", "dynamic": "static",
        "continuous": "static", "paged": "continuous", "prefix": "paged", "chunked": "prefix",
        "overlap": "chunked",
    }  # fmt: skip
    engines = [each.config(model).engine for each in ablations[1:]]
    assert {engine.cache.cache_bytes for engine in engines} == {engines[0].cache.cache_bytes}
    assert {engine.max_context for engine in engines} == {128}
    need = sum(-(-each.num_tokens // 16) * 16 for each in load)
    per_token = sum(group.bytes_per_page("float32", 1) for group in model.page_groups)
    assert engines[0].cache.cache_bytes == need * per_token // 2
    assert engines[3].cache.page_tokens == 128 and engines[3].max_seqs == need // 2 // 128
    assert [engine.shapes.prefill_chunks for engine in engines] == 6 * [tuple(range(1, 9))] + 2 * [
        (1, 2, 4, 8)
    ]
    assert [each.name for each in ablations if each.by_turns] == ["overlap"]
    many = EngineConfig.of(chunk_tokens=8, decode_rows=tuple(range(1, 25)), prefill_chunks=(8,))
    for each in ablation.ablations(model, many, _load(num_requests=32))[1:]:
        enumerate_shapes(each.engine)  # where the last one's are few enough, so are the others'
    assert engines[4].cache.page_tokens == 16 and engines[4].max_seqs == len(load)
    with pytest.raises(InputError, match="requests grow to 305 tokens, in whole blocks 384"):
        ablation.ablations(model, EngineConfig(), [TimedRequest(0.0, (1,) * 300, 5)])


def test_an_ablation_is_judged_by_its_own_metric():
    """The simulation stands for the engine, on a faster chip."""
    model, load = fakes.llama(), _load(num_requests=24, rate=1e4)
    _, *ablations = ablation.ablations(model, EngineConfig.of(chunk_tokens=8), load)
    faster = dataclasses.replace(CHIP, overhead_s=0.5e-3)
    order = []

    def figures(kind, chip):
        def run(each):
            order.append((kind, each.name))
            return measure.figures([measure.predict(each.config(model), load, chip)])

        return run

    timed = figures("measured", faster)
    results = list(
        ablation.run(ablations, figures("predicted", CHIP), lambda turns: list(map(timed, turns)))
    )
    rows = {each.ablation.name: each.as_json() for each in results}
    assert order[:4] == [("predicted", "cached"), ("measured", "cached"),
                         ("predicted", "static"), ("measured", "static")]  # fmt: skip
    assert order[-3:] == [("predicted", "overlap"), ("measured", "chunked"),
                          ("measured", "overlap")]  # fmt: skip
    assert rows["cached"]["measured"]["gain"] is None
    for row in list(rows.values())[1:]:
        for found in (row["measured"], row["predicted"]):
            assert found["figures"][row["metric"]] == found["after"]
            better, worse = found["after"], found["before"]
            better, worse = (worse, better) if row["less_is_better"] else (better, worse)
            assert found["gain"] == pytest.approx(better / worse)
    assert rows["paged"]["measured"]["gain"] > 1.5


def test_half_a_page_is_wasted():
    load = [TimedRequest(0.0, (1,) * 100, 40)]
    assert ablation.half_page_waste(load, 16) == pytest.approx(8 / 128)
    config = Config(fakes.llama(), EngineConfig.of(page_tokens=16))
    found = measure.figures([measure.predict(config, load, CHIP)])
    assert found["kv_waste"] == pytest.approx(8 / 128, abs=0.02)


def test_interference_is_measured_where_it_happens():
    model = fakes.llama(max_context=1024)
    probe = Interference(num_running=3, num_tokens=600)
    base = EngineConfig.of(chunk_tokens=16, prefill_chunks=(1, 4))

    def serve(way, load):
        config = Config(model, probe.engine(model, base, way))
        return [measure.predict(config, load, CHIP)]

    found = probe.measure(131, serve)
    assert found["undisturbed"]["itl_p99_s"] < found["chunked"]["itl_p99_s"]
    assert found["chunked"]["times_undisturbed"] > 1 and found["chunked"]["ttft_s"] > 0
    apart = probe.predicted_apart(131, lambda load: serve("unchunked", load)[0], 1.0)
    assert apart["itl_p99_s"] == pytest.approx(found["undisturbed"]["itl_p99_s"], rel=0.02)
    assert 1 < apart["ttft_s"] < 1 + found["chunked"]["ttft_s"]
    with pytest.raises(InputError, match="num_running is at least 1, not 0"):
        Interference(0, 10)
    with pytest.raises(InputError, match="needs a context of 1152, the model's holds 1024"):
        Interference(1, 1024).engine(model, base, "chunked")


def test_host_cost_counts_every_part():
    found = host_cost.measure(fakes.llama(max_context=1024), 4)
    parts = found.schedule_s, found.build_s, found.commit_s
    assert all(part > 0 for part in parts) and found.total_s < found.total_p99_s
    assert found.total_s == pytest.approx(sum(parts), rel=0.5)


@pytest.mark.long
@pytest.mark.parametrize("num_running, most_s", [(64, 1e-3), (256, 3e-3)])
def test_the_host_keeps_up(num_running, most_s):
    found = host_cost.measure(presets.get("smollm2-135m").config, num_running)
    print(f"{num_running} running: {1e3 * found.total_s:.2f} ms a step")
    assert found.total_s <= most_s
