"""Metrics of `/metrics`, under vLLM's names where the meaning is the same, so that its dashboards
work. No label holds a client's data.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from inference.request import SamplingParams
from inference.server.client.engine_client import EngineClient
from inference.server.engine_metrics import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("stop", "length", "abort", "error")  # why answers end
REJECTIONS = ("queue_full", "key_share", "deadline", "queue_time")  # why requests find no room

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_SOME = (1, 2, 5, 10, 20)
# What `Metrics.observe` observes: name of the metric, description, buckets.
_HISTOGRAMS = {
    "first": ("vllm:time_to_first_token_seconds", "From a request to its first token.", _SECONDS),
    "gap": ("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _GAPS),
    "mean_gap": ("vllm:request_time_per_output_token_seconds", "Its mean over an answer.", _GAPS),
    "whole": ("vllm:e2e_request_latency_seconds", "From a request to its end.", _SECONDS),
    "queue": ("vllm:request_queue_time_seconds", "Until it was scheduled first.", _SECONDS),
    "prefill": ("vllm:request_prefill_time_seconds", "From then to its first token.", _SECONDS),
    "decode": ("vllm:request_decode_time_seconds", "From its first token to its last.", _SECONDS),
    "inference": ("vllm:request_inference_time_seconds", "Both of these.", _SECONDS),
    "prompt": ("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "answer": ("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS),
    "max_tokens": ("vllm:request_params_max_tokens", "Tokens that an answer may have.", _TOKENS),
    "n": ("vllm:request_params_n", "Answers asked for.", _SOME),
    "preemptions": ("vllm:request_num_preemptions", "Times that it gave up its pages.", _SOME),
}


class Metrics:
    """Counts requests, and collects the engine's metrics with them.

    Attributes:
        rejected: counts a request without room; takes one of `REJECTIONS`.
        corrupted: counts an answer that the model could not generate.
        disconnected, stalled: count a client that left, or was disconnected as it did not read.
        stream_failed: counts a stream that ended with an error.
        ignored: counts fields that the server ignores; `by`: how many.
    """

    def __init__(self, client: EngineClient, model_name: Callable[[], str]):
        disable_created_metrics()  # they would add a line to each metric
        self._model_name = model_name
        self._registry = CollectorRegistry()
        # With labels after the model's name that are known in advance: a counter that appears with
        # its first event has no rate.
        self._known: list[tuple[Counter | Histogram, tuple[str, ...]]] = []
        self._registry.register(EngineCollector(client, model_name))
        ProcessCollector(registry=self._registry)
        self._ended = self._counter(
            "vllm:request_success", "Answers that ended.", finished_reason=REASONS
        )
        self.corrupted = self._counter(
            "vllm:corrupted_requests", "Answers that the model could not go on with: NaN, say."
        )
        self.rejected = self._counter(
            "vllm:admission_rejections",
            "Requests that were refused for lack of room.",
            reason=REJECTIONS,
        )
        self.disconnected = self._counter(
            "ridgeline:client_disconnects", "Clients that left before the end of their answer."
        )
        self.stalled = self._counter(
            "ridgeline:stream_stalls", "Clients that were disconnected since they did not read."
        )
        self.stream_failed = self._counter(
            "ridgeline:stream_errors", "Streams that ended with an error."
        )
        self.ignored = self._counter(
            "ridgeline:ignored_params", "Fields of requests that nobody reads."
        )
        self._responses = Counter(
            "http_requests", "Requests that were answered.", ("handler", "method", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._histograms = {
            name: Histogram(
                metric, about, ("model_name",), registry=self._registry, buckets=buckets
            )
            for name, (metric, about, buckets) in _HISTOGRAMS.items()
        }
        self._known += [(histogram, ()) for histogram in self._histograms.values()]

    def text(self) -> bytes:
        if name := self._model_name():
            for metric, labels in self._known:
                metric.labels(name, *labels)
        return generate_latest(self._registry)

    def answered(self, handler: str, method: str, status: int) -> None:
        """Counts an answer when its head is sent; `handler`: a path of this server."""
        self._responses.labels(handler, method, f"{status // 100}xx").inc()

    def value(self, name: str) -> float:
        """The value of a metric without labels except the model's name; 0 before its first."""
        return self._registry.get_sample_value(name, {"model_name": self._model_name()}) or 0.0

    def observe(self, measure: str, value: float) -> None:
        """Adds a value to the histogram of a measure in `_HISTOGRAMS`."""
        self._histograms[measure].labels(self._model_name()).observe(value)

    def count_prompt(self, num_prompt_tokens: int, params: SamplingParams | None = None) -> None:
        """Observes a prompt that was sent to the engine, and its parameters."""
        self.observe("prompt", num_prompt_tokens)
        if params is not None:
            self.observe("n", params.n)
            self.observe("max_tokens", params.max_new_tokens)

    @contextmanager
    def watching(self, num_answers: int, prepared_s: float = 0.0) -> Iterator[list["Watch"]]:
        """Watches the answers to a request that came `prepared_s` ago. Answers that have not ended
        at the end of the block count as aborted, or as failed if it raises.
        """
        watches, reason = [Watch(self, prepared_s) for _ in range(num_answers)], "abort"
        try:
            yield watches
        except Exception:
            reason = "error"
            raise
        finally:
            for watch in watches:
                if not watch.has_ended:
                    self._ended(reason)

    def _counter(self, name: str, about: str, **values: tuple[str, ...]) -> Callable[..., None]:
        """Adds a counter with further labels and their values; returns what counts."""
        counter = Counter(name, about, ("model_name", *values), registry=self._registry)
        self._known += [(counter, labels) for labels in itertools.product(*values.values())]

        def count(*labels: str, by: int = 1) -> None:
            counter.labels(self._model_name(), *labels).inc(by)

        return count


class Watch:
    """Measures when the tokens of one answer come.

    Attributes:
        has_ended: the answer is whole.
        queued_s, first_s: seconds until it was scheduled, and until its first token; None: not yet.
    """

    def __init__(self, metrics: Metrics, prepared_s: float = 0.0):
        """`prepared_s`: since the request came; the prompt was encoded meanwhile."""
        self._metrics = metrics
        self._prepared_s = prepared_s
        self._started = time.perf_counter() - prepared_s
        self._last = 0.0
        self._num_tokens = 0
        self.has_ended = False
        self.queued_s: float | None = None
        self.first_s: float | None = None

    def note(self, num_tokens: int, queued_s: float = 0.0) -> None:
        """Observes new tokens; `queued_s`: that the answer waited in the engine's queue."""
        now = time.perf_counter() - self._started
        if self.first_s is None:
            self.first_s, self.queued_s = now, min(queued_s, now - self._prepared_s)
            self._metrics.observe("first", now)
        elif num_tokens:
            self._metrics.observe("gap", (now - self._last) / num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def end(self, reason: str, num_preemptions: int = 0) -> None:
        self.has_ended = True
        metrics = self._metrics
        metrics.observe("whole", time.perf_counter() - self._started)
        metrics.observe("answer", self._num_tokens)
        metrics.observe("preemptions", num_preemptions)
        metrics._ended(reason)
        if self.first_s is None or self.queued_s is None:
            return
        decode_s = self._last - self.first_s
        metrics.observe("queue", self.queued_s)
        metrics.observe("prefill", self.first_s - self._prepared_s - self.queued_s)
        metrics.observe("decode", decode_s)
        metrics.observe("inference", self._last - self._prepared_s - self.queued_s)
        if self._num_tokens > 1:
            metrics.observe("mean_gap", decode_s / (self._num_tokens - 1))
