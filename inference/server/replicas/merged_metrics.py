"""Metrics of several replicas as one text: each series says whose it is."""

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
    """Counts what only a gateway sees."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._retried = Counter(
            "ridgeline:replica_retries",
            "Requests whose replica ended before it told anything: another has them.",
            registry=self._registry,
        )
        self._lost = Counter(
            "ridgeline:replica_lost_streams",
            "Streams that ended with an error because their replica did.",
            registry=self._registry,
        )

    def retried(self) -> None:
        """A request is tried again."""
        self._retried.inc()

    def lost(self) -> None:
        """An answer ended with its replica."""
        self._lost.inc()

    def text(self, texts: Mapping[str, str]) -> bytes:
        """All metrics, for Prometheus; `texts`: those of replicas, by their ids."""
        merged = CollectorRegistry()
        merged.register(_Merged(texts))
        return generate_latest(self._registry) + generate_latest(merged)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        """Nothing: what it is called shows when it is collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the series of all replicas."""
        found: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                known = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels=sample.labels | {"replica": replica})
                    for sample in family.samples
                ]
        yield from found.values()
