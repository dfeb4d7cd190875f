"""What `/metrics` shows, as Prometheus reads it."""

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference.outputs import RequestOutput
from inference.server.client.launch import Thread
from inference.server.frames import Heartbeat
from inference.server.service import Limits
from inference.server.text_processor import TextProcessor
from tests.inference.server.fake_engine import CRASHES, FakeEngine
from tests.inference.server.running import running, wait_until

ROOT = Path(__file__).parents[3]
PROMQL = {
    "sum", "max", "avg", "by", "rate", "increase", "histogram_quantile", "ignoring", "group_left"
}  # fmt: skip
TEXT = "/v1/completions"
OWN = ("model_name",)
HTTP = ("handler", "method", "status")
PROCESS = {
    "process_virtual_memory_bytes": "gauge", "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge", "process_cpu_seconds": "counter",
    "process_open_fds": "gauge", "process_max_fds": "gauge",
}  # fmt: skip
GAUGES = {
    "vllm:num_requests_running": OWN, "vllm:num_requests_waiting": OWN,
    "vllm:num_requests_waiting_by_reason": (*OWN, "reason"), "vllm:kv_cache_usage_perc": OWN,
    "vllm:cache_config_info": (
        "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine"
    ),
    "ridgeline:oldest_waiting_seconds": OWN, "ridgeline:page_waste": OWN,
    "ridgeline:page_sharing": OWN, "ridgeline:read_bandwidth_bytes": OWN,
    "ridgeline:prefill_processes": OWN, "ridgeline:prefill_planned_bandwidth_bytes": OWN,
    "ridgeline:engine_ready": OWN,
}  # fmt: skip
COUNTERS = {
    "vllm:prompt_tokens": OWN, "vllm:prompt_tokens_cached": OWN, "vllm:generation_tokens": OWN,
    "vllm:prefix_cache_queries": OWN, "vllm:prefix_cache_hits": OWN, "vllm:num_preemptions": OWN,
    "vllm:spec_decode_num_drafts": OWN, "vllm:spec_decode_num_draft_tokens": OWN,
    "vllm:spec_decode_num_accepted_tokens": OWN,
    "vllm:spec_decode_num_accepted_tokens_per_pos": (*OWN, "position"),
    "vllm:request_success": (*OWN, "finished_reason"), "vllm:corrupted_requests": OWN,
    "vllm:admission_rejections": (*OWN, "reason"), "http_requests": HTTP,
    "ridgeline:steps": OWN, "ridgeline:late_compiles": OWN, "ridgeline:compile_seconds": OWN,
    "ridgeline:prefill_received_bytes": OWN, "ridgeline:prefill_received_seconds": OWN,
    "ridgeline:host_seconds": OWN, "ridgeline:timed_steps": (*OWN, "kind"),
    "ridgeline:step_seconds": (*OWN, "kind"), "ridgeline:predicted_step_seconds": (*OWN, "kind"),
    "ridgeline:step_bytes": (*OWN, "kind"), "ridgeline:engine_restarts": OWN,
    "ridgeline:client_disconnects": OWN, "ridgeline:stream_stalls": OWN,
    "ridgeline:stream_errors": OWN, "ridgeline:ignored_params": OWN,
}  # fmt: skip
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:iteration_tokens_total",
    "vllm:request_num_preemptions",
)  # fmt: skip
LABELS = GAUGES | COUNTERS | dict.fromkeys(HISTOGRAMS, OWN) | dict.fromkeys(PROCESS, ())


def families(server):
    return list(text_string_to_metric_families(server.http.get("/metrics").text))


def counts(server):
    """Every sample that never falls, by its name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families(server)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def count(server, name, **labels):
    return counts(server).get((name, *sorted({"model_name": "fake", **labels}.items())), 0)


def ask(server, **asked):
    return server.post(TEXT, **{"prompt": "a", "max_tokens": 4} | asked)


class Later(FakeEngine):
    """Requests wait for a while, as it says."""

    def step(self):
        how = {"queued_s": 1e-3, "num_preemptions": 3}
        return [dataclasses.replace(output, **how) for output in super().step()]


class Idle(FakeEngine):
    """It has not said anything of itself yet, and this machine is not known."""

    def heartbeat(self):
        return Heartbeat()


class Broken(FakeEngine):
    """Its logits are not finite."""

    def step(self):
        outputs, self.running = self.running, []
        return [RequestOutput(each.id, [], "", "error") for each in outputs]


@pytest.fixture(scope="module")
def engine():
    return Later(step_s=0.002)


@pytest.fixture(scope="module")
def busy(server):
    """A server where everything has happened that is counted by a label of its own."""
    assert ask(server, n=2, made_up=1).status_code == 200
    server.service.metrics.rejected("queue_full")
    server.http.get("/secret/path?of=somebody")
    server.http.request("PROPFIND", "/v1/models/some/name")
    wait_until(lambda: count(server, "ridgeline:steps_total"))
    return server


def test_every_name_has_its_type_and_labels(busy):
    found = families(busy)
    kinds = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter") | PROCESS
    kinds |= dict.fromkeys(HISTOGRAMS, "histogram")
    assert {family.name: family.type for family in found} == kinds
    for family in found:
        assert family.documentation.endswith((".", "say.")) or family.name in PROCESS
        for sample in family.samples:
            labels = sample.labels.keys() - {"le"}
            assert labels == set(LABELS[family.name]), sample
            assert sample.labels.get("model_name", "fake") == "fake"


def test_tokens_are_counted_up_to_ones_twos_and_fives(busy):
    bounds = {
        float(sample.labels["le"])
        for family in families(busy) if family.name.endswith("_tokens")
        for sample in family.samples if "le" in sample.labels
    }  # fmt: skip
    series = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    assert bounds == {*series[:16], float("inf")}


def test_labels_hold_nothing_that_a_client_made_up(busy):
    text = busy.http.get("/metrics").text
    for sent in ("secret", "somebody", "PROPFIND", "some/name", "made_up"):
        assert sent not in text
    found = counts(busy)
    for handler, method, status in (
        ("other", "GET", "4xx"), ("/v1/models/{id}", "other", "4xx"), (TEXT, "POST", "2xx"),
    ):  # fmt: skip
        labels = {"handler": handler, "method": method, "status": status}
        assert found["http_requests_total", *sorted(labels.items())] == 1


def test_times_of_a_request_add_up(busy):
    def sums():
        kinds = ("queue", "prefill", "decode", "inference")
        names = [f"vllm:request_{kind}_time_seconds" for kind in kinds]
        names += ["vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"]
        return [count(busy, f"{name}_{what}") for name in names for what in ("sum", "count")]

    before = sums()
    assert ask(busy, max_tokens=6).status_code == 200
    more = [b - a for a, b in zip(before, sums(), strict=True)]
    (queue, prefill, decode, inference, first, mean), counted = more[::2], more[1::2]
    assert counted == [1] * 6
    prepared = first - queue - prefill
    assert queue >= 1e-3 and first > prepared > 0  # and a moment in the queue before the engine
    assert inference == pytest.approx(prefill + decode) and mean == pytest.approx(decode / 5)
    assert prefill > 0 and decode > 0.005


def test_times_begin_when_the_request_comes(busy, monkeypatch):
    encode = TextProcessor.encode

    async def slow(*how):
        await asyncio.sleep(0.2)
        return await encode(*how)

    monkeypatch.setattr(TextProcessor, "encode", slow)
    names = [
        f"vllm:{what}_seconds_sum"
        for what in (
            "time_to_first_token", "e2e_request_latency", "request_prefill_time",
            "request_inference_time",
        )
    ]  # fmt: skip
    before, start = [count(busy, name) for name in names], time.monotonic()
    assert ask(busy).status_code == 200
    took = time.monotonic() - start
    first, whole, prefill, inference = [
        count(busy, name) - a for name, a in zip(names, before, strict=True)
    ]
    assert took > whole > first > 0.2
    assert prefill < first - 0.19 and inference < whole - 0.19


def test_requests_are_counted_with_what_they_ask_for(busy):
    names = [f"vllm:request_params_{what}" for what in ("n_sum", "n_count", "max_tokens_sum")]
    names += [f"vllm:request_num_preemptions_{what}" for what in ("sum", "count")]
    before = [count(busy, name) for name in names]
    assert ask(busy, n=3, max_tokens=7).status_code == 200
    after = [count(busy, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 1, 7, 9, 3]


def test_gauges_are_the_heartbeat(busy, engine):
    wait_until(lambda: count(busy, "ridgeline:steps_total") == engine.num_steps)
    text = busy.http.get("/metrics").text
    own = 'model_name="fake"'
    for line in (
        f"ridgeline:page_waste{{{own}}} 0.1", f"ridgeline:page_sharing{{{own}}} 0.2",
        f"ridgeline:oldest_waiting_seconds{{{own}}} 0.5",
        f"ridgeline:read_bandwidth_bytes{{{own}}} 3e+10", f"ridgeline:engine_ready{{{own}}} 1.0",
    ):  # fmt: skip
        assert line in text
    steps = engine.num_steps
    for name, labels, value in (
        ("vllm:iteration_tokens_total_count", {}, steps),
        ("vllm:iteration_tokens_total_bucket", {"le": "1.0"}, steps),
        ("vllm:iteration_tokens_total_sum", {}, steps / 10),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"position": "0"}, 2 * steps),
        ("ridgeline:predicted_step_seconds_total", {"kind": "decode"}, steps / 10),
    ):  # fmt: skip
        assert count(busy, name, **labels) == value > 0


def test_answers_that_do_not_end_well_are_counted():
    ended = "vllm:request_success_total"
    with running(FakeEngine(step_s=0.02)) as one:
        assert count(one, ended, finished_reason="abort") == 0
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        with one.http.stream("POST", TEXT, json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: count(one, ended, finished_reason="abort") == 1)
        assert count(one, "ridgeline:client_disconnects_total") == 1
        assert count(one, "vllm:e2e_request_latency_seconds_count") == 0
    with running(Broken()) as one:
        assert ask(one).status_code == 500
        assert ask(one, stream=True).status_code == 500
        assert count(one, ended, finished_reason="error") == 2
        assert count(one, "vllm:corrupted_requests_total") == 2


def test_streams_that_fail_are_counted():
    with running(FakeEngine(step_s=0.02), Limits(request_s=1)) as one:
        response = ask(one, max_tokens=400, stream=True)
        assert response.status_code == 200 and '"timeout"' in response.text
        assert count(one, "ridgeline:stream_errors_total") == 1
        assert count(one, "vllm:request_success_total", finished_reason="error") == 1


def test_no_count_falls_when_the_engine_is_started_again():
    with running(Thread(lambda: FakeEngine(step_s=0.001))) as one:
        for _ in range(3):
            ask(one, max_tokens=50)
        wait_until(lambda: count(one, "ridgeline:steps_total") >= 100)
        before = counts(one)
        one.post(TEXT, prompt=[CRASHES], max_tokens=2)
        wait_until(lambda: count(one, "ridgeline:engine_restarts_total"))
        seen, steps = [before], ("ridgeline:steps_total", ("model_name", "fake"))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            seen.append(counts(one))
            if one.service.client.state.value == "ready" and seen[-1] != seen[-2]:
                ask(one, max_tokens=20)
            if seen[-1][steps] > before[steps]:
                break
        assert seen[-1][steps] > before[steps]
        for earlier, later in zip(seen, seen[1:], strict=False):
            assert all(later[key] >= value for key, value in earlier.items())


def test_the_dashboard_shows_what_there_is_from_the_start():
    """A panel whose metric appears with its first event has no rate of it."""
    path = ROOT / "docs" / "deploy" / "grafana.json"
    run = [
        sys.executable,
        "-c",
        "from scripts.reports import grafana; print(grafana.text(), end='')",
    ]
    written = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True)
    assert path.read_text("utf-8") == written.stdout, "stale: python -m scripts.reports.grafana"
    with running(Idle()) as one:
        samples = [sample for family in families(one) for sample in family.samples]
    there = {sample.name: sample.labels for sample in samples}
    counters = [s.value for s in samples if s.name.endswith(("_total", "_count", "_bucket"))
                and not s.name.startswith(("process", "http"))]  # fmt: skip
    assert len(counters) > 100 and not any(counters)
    panels = json.loads(written.stdout)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 40
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        selectors = re.findall(r"([a-z_:][a-z0-9_:]*)\{([^}]*)\}", query)
        rest = re.sub(r"[a-z_:][a-z0-9_:]*\{[^}]*\}|\[[^]]*\]", "", query)
        words = set(re.findall(r"[a-z_:][a-z0-9_:]*", rest))
        grouped = set(re.findall(r"(?:by|ignoring) ?\((\w+)\)", query))
        assert words - grouped <= PROMQL, query
        for name, labels in selectors:
            assert name in there, name
            assert set(re.findall(r"(\w+)!?=", labels)) <= there[name].keys(), query
        names = {name for name, _ in selectors}
        assert grouped <= {label for name in names for label in there[name]}, query
        assert selectors
