"""Metrics of several replicas as one text, with a label `replica`."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class GatewayMetrics:
    """Counts events of the gateway, and merges the metrics of replicas.

    Attributes:
        retried: counts a request that another replica gets.
        lost: counts an answer that ended with its replica.
    """

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.retried = Counter(
            "ridgeline:replica_retries",
            "Requests whose replica ended before it told anything: another has them.",
            registry=self._registry,
        ).inc
        self.lost = Counter(
            "ridgeline:replica_lost_streams",
            "Streams that ended with an error because their replica did.",
            registry=self._registry,
        ).inc

    def text(self, texts: Mapping[str, str]) -> bytes:
        """All metrics in Prometheus's text format; `texts`: id of a replica -> its metrics."""
        merged = CollectorRegistry()
        merged.register(_Merged(texts))
        return generate_latest(self._registry) + generate_latest(merged)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known only when the metrics are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields each metric once, with the series of all replicas."""
        metrics: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                metric = metrics.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                metric.samples += [
                    sample._replace(labels=sample.labels | {"replica": replica})
                    for sample in family.samples
                ]
        yield from metrics.values()
