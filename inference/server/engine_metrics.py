"""Metrics of the engine for `/metrics`, from its latest heartbeat."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from inference.server.client.engine_client import EngineClient, State
from inference.server.frames import ITERATION_TOKENS, Heartbeat

# Counter of the heartbeat, name of the metric, description.
_COUNTERS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Tokens of prompts that were started."),
    ("cached_tokens", "vllm:prompt_tokens_cached", "Those of them that were cached."),
    ("generated_tokens", "vllm:generation_tokens", "Tokens generated."),
    ("prompt_tokens", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("cached_tokens", "vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    ("preemptions", "vllm:num_preemptions", "Sequences that gave up their pages."),
    ("draft_rounds", "vllm:spec_decode_num_drafts", "Times that drafts were verified."),
    ("drafts", "vllm:spec_decode_num_draft_tokens", "Drafts that were verified."),
    ("accepted_drafts", "vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted."),
    ("steps", "ridgeline:steps", "Steps of the engine."),
    ("late_compiles", "ridgeline:late_compiles", "Compilations after warm-up."),
    ("compile_seconds", "ridgeline:compile_seconds", "Seconds of steps spent compiling."),
    ("prefill_received_bytes", "ridgeline:prefill_received_bytes",
     "Bytes of pages that prefill processes sent."),
    ("prefill_received_seconds", "ridgeline:prefill_received_seconds",
     "Seconds that these took once their frames began."),
    ("host_seconds", "ridgeline:host_seconds", "Seconds of the host's work for steps."),
)  # fmt: skip
# Counters of decoding and prefill steps, by a label `kind`.
_STEPS = (
    ("ridgeline:timed_steps", "Steps that were timed.",
     {"decode": "decode_steps", "prefill": "prefill_steps"}),
    ("ridgeline:step_seconds", "Seconds that steps took.",
     {"decode": "decode_step_seconds", "prefill": "prefill_step_seconds"}),
    ("ridgeline:predicted_step_seconds",
     "Seconds that the same steps should have taken, where the machine is calibrated.",
     {"decode": "predicted_decode_step_seconds"}),
    ("ridgeline:step_bytes", "Bytes that they had to move.", {"decode": "decode_step_bytes"}),
)  # fmt: skip


class EngineCollector(Collector):
    """Collects metrics from the engine's latest heartbeat."""

    def __init__(self, client: EngineClient, model_name: Callable[[], str]):
        self._client, self._model_name = client, model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise collect before there is an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Current metrics: counters from 0 on, NaN for unknown gauges."""
        heartbeat, client = self._client.heartbeat, self._client
        yield from self._gauges(heartbeat)
        yield from self._counters(heartbeat.counters)
        yield self._iterations(heartbeat)
        yield self._metric(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their position.",
            {str(n): count for n, count in enumerate(heartbeat.accepted_per_position or [0])},
            "position",
        )
        yield self._metric(
            CounterMetricFamily,
            "ridgeline:engine_restarts",
            "Times the engine ended and was started again.",
            client.num_restarts,
        )
        if client.facts is not None and client.facts.cache:
            labels = client.facts.cache | {"engine": "0"}
            about = "How the pages are set up."
            info = GaugeMetricFamily("vllm:cache_config_info", about, labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info

    def _gauges(self, heartbeat: Heartbeat) -> Iterator[Metric]:
        is_ready = self._client.state is State.READY
        gauges: list[tuple[str, str, float | None]] = [
            ("vllm:num_requests_running", "Sequences that run.", heartbeat.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", heartbeat.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", heartbeat.cache_used),
            ("ridgeline:oldest_waiting_seconds", "Since the first of those came that never ran.",
             heartbeat.oldest_waiting_s),
            ("ridgeline:page_waste", "Share of the pages' room without a token.",
             heartbeat.page_waste),
            ("ridgeline:page_sharing", "Share of pages that sharing saves.",
             heartbeat.page_sharing),
            ("ridgeline:read_bandwidth_bytes", "Bytes a second that the machine reads.",
             heartbeat.read_bandwidth),
            ("ridgeline:prefill_processes", "Prefill processes that are connected.",
             heartbeat.prefill_processes),
            ("ridgeline:prefill_planned_bandwidth_bytes",
             "Planned bytes a second of the connection to each of them.",
             heartbeat.prefill_bandwidth),
            ("ridgeline:engine_ready", "Whether the engine serves; 1 if so.", is_ready),
        ]  # fmt: skip
        for name, about, value in gauges:
            yield self._metric(GaugeMetricFamily, name, about, math.nan if value is None else value)
        deferred = heartbeat.num_deferred  # they wait for others of their request, not for room
        yield self._metric(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, and for what.",
            {"capacity": heartbeat.num_waiting - deferred, "deferred": deferred},
            "reason",
        )

    def _counters(self, counters: Mapping[str, float]) -> Iterator[Metric]:
        for key, name, about in _COUNTERS:
            yield self._metric(CounterMetricFamily, name, about, counters.get(key, 0))
        for name, about, kinds in _STEPS:
            if counters.get("decode_steps"):  # steps ran: an absent counter is unknown, not 0
                kinds = {kind: key for kind, key in kinds.items() if key in counters}
            if kinds:
                values = {kind: counters.get(key, 0) for kind, key in kinds.items()}
                yield self._metric(CounterMetricFamily, name, about, values, "kind")

    def _iterations(self, heartbeat: Heartbeat) -> Metric:
        name, about = "vllm:iteration_tokens_total", "Tokens that a step computed."
        histogram = HistogramMetricFamily(name, about, labels=("model_name",))
        bounds, total, buckets = [*map(str, ITERATION_TOKENS), "+Inf"], 0, []
        counts = heartbeat.iteration_tokens or [0] * len(bounds)
        for bound, count in zip(bounds, counts, strict=True):
            total += count
            buckets.append((f"{bound}.0" if bound != "+Inf" else bound, total))
        num_tokens = heartbeat.counters.get("step_tokens", 0)
        histogram.add_metric((self._model_name(),), buckets, num_tokens)
        return histogram

    def _metric(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        about: str,
        values: float | Mapping[str, float],
        label: str = "",
    ) -> Metric:
        """A metric with one value, or with one for each value of a label."""
        by_label = values if isinstance(values, Mapping) else {"": values}
        family = kind(name, about, labels=("model_name", label) if label else ("model_name",))
        for label_value, value in by_label.items():
            model_name = self._model_name()
            family.add_metric((model_name, label_value) if label else (model_name,), value)
        return family
