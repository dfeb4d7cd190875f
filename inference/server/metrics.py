"""What `/metrics` shows: vLLM's names where the meaning is the same, so that its dashboards work;
no label holds what a client sent.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.server.client.engine_client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

# Of the engine's heartbeat: its name there, the name here, what it is.
_COUNTERS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Tokens of prompts that were started."),
    ("generated_tokens", "vllm:generation_tokens", "Tokens generated."),
    ("prompt_tokens", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("cached_tokens", "vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    ("preemptions", "vllm:num_preemptions", "Sequences that gave up their pages."),
    ("drafts", "vllm:spec_decode_num_draft_tokens", "Drafts that were verified."),
    ("accepted_drafts", "vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted."),
    ("steps", "ridgeline:steps", "Steps of the engine."),
    ("late_compiles", "ridgeline:late_compiles", "Compilations after warm-up."),
)


class Metrics:
    """Counts requests, and reads the engine's own figures when asked."""

    def __init__(self, client: EngineClient, model_name: Callable[[], str]):
        disable_created_metrics()  # a line for each of the others, which nobody reads
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(client, model_name))
        self._success = self._counter(
            "vllm:request_success", "Answers that ended.", "finished_reason"
        )
        self._rejected = self._counter(
            "vllm:admission_rejections", "Requests that were refused for lack of room.", "reason"
        )
        self._disconnects = self._counter(
            "ridgeline:client_disconnects", "Clients that left before the end of their answer."
        )
        self._ignored = self._counter(
            "ridgeline:ignored_params", "Fields of requests that nobody reads."
        )
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", _SECONDS
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _GAPS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end.", _SECONDS
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def value(self, name: str) -> float:
        """What is shown under a name that has no label but the model's; 0 before there is any."""
        labels = {"model_name": self._model_name()}
        return self._registry.get_sample_value(name, labels) or 0.0

    def rejected(self, reason: str) -> None:
        """A request found no room."""
        self._rejected.labels(self._model_name(), reason).inc()

    def disconnected(self) -> None:
        """A client left."""
        self._disconnects.labels(self._model_name()).inc()

    def ignored(self, num_fields: int) -> None:
        """A request had so many fields that nobody reads."""
        self._ignored.labels(self._model_name()).inc(num_fields)

    def asked(self, num_prompt_tokens: int) -> None:
        """The engine was asked to go on from a prompt."""
        self._prompt.labels(self._model_name()).observe(num_prompt_tokens)

    def watch(self) -> "Watch":
        """The times of an answer that begins now."""
        name = self._model_name()
        return Watch(
            self._first.labels(name), self._gap.labels(name), self._whole.labels(name),
            self._answer.labels(name), lambda reason: self._success.labels(name, reason).inc(),
        )  # fmt: skip

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, ("model_name",), registry=self._registry, buckets=buckets)


class Watch:
    """When the tokens of one answer came."""

    def __init__(
        self,
        first: Histogram,
        gap: Histogram,
        whole: Histogram,
        answer: Histogram,
        success: Callable[[str], None],
    ):
        self._first, self._gap, self._whole, self._answer = first, gap, whole, answer
        self._success = success
        self._started = time.perf_counter()
        self._last: float | None = None
        self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """So many have come."""
        now = time.perf_counter()
        if self._last is None:
            self._first.observe(now - self._started)
        elif num_tokens:
            self._gap.observe((now - self._last) / num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def end(self, reason: str) -> None:
        """The answer is whole."""
        self._whole.observe(time.perf_counter() - self._started)
        self._answer.observe(self._num_tokens)
        self._success(reason)


class _Engine(Collector):
    """What the engine said last."""

    def __init__(self, client: EngineClient, model_name: Callable[[], str]):
        self._client, self._model_name = client, model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: the registry would ask an engine that is not there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Its figures now."""
        heartbeat = self._client.heartbeat
        gauges = (
            ("vllm:num_requests_running", "Sequences that run.", heartbeat.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", heartbeat.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", heartbeat.cache_used),
        )
        for name, about, value in gauges:
            gauge = GaugeMetricFamily(name, about, labels=("model_name",))
            gauge.add_metric((self._model_name(),), value)
            yield gauge
        for key, name, about in _COUNTERS:
            yield self._counter(name, about, heartbeat.counters.get(key, 0))
        about = "Times the engine ended and was started again."
        yield self._counter("ridgeline:engine_restarts", about, self._client.num_restarts)

    def _counter(self, name: str, about: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, about, labels=("model_name",))
        counter.add_metric((self._model_name(),), value)
        return counter
