"""What a front counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from tfdist.serving.front import ModelRoute

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_GAUGES = {
    "waiting": "Requests that wait for a replica",
    "outstanding": "Requests that replicas have",
    "replicas": "Replicas that take requests",
}
_COUNTS = {
    "retried": "Requests that were sent again as their replica had ended",
    "rejected": "Requests that found the queue full",
    "expired": "Requests whose deadline passed",
    "poisonous": "Requests with which two replicas ended",
}


class Metrics:
    """Requests by outcome and time, and how full the queues are."""

    def __init__(self, models: Mapping[str, ModelRoute]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tfdist_serving_requests",
            "Requests that were answered",
            ["via", "model", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "tfdist_serving_request_seconds",
            "From the request to its answer",
            ["via", "model"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._children: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._models = models
        self._registry.register(self)  # its `collect` is asked for the state of the models

    def observe(self, *, via: str, model: str, code: str, seconds: float) -> None:
        """Count an answered request."""
        key = (via, model, code)
        if key not in self._children:  # looking them up by their labels takes longer than counting
            self._children[key] = (self._requests.labels(*key), self._seconds.labels(via, model))
        requests, times = self._children[key]
        requests.inc()
        times.observe(seconds)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text form."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Any]:
        """Yield the state of the models now, a metric after the other, each with all models."""
        for key, about in _GAUGES.items():
            gauge = GaugeMetricFamily(f"tfdist_serving_{key}", about, labels=["model"])
            for name, model in self._models.items():
                values = [getattr(version, key) for version in model.dispatchers.values()]
                gauge.add_metric([name], sum(values))
            yield gauge
        about = "The newest version that is served"
        versions = GaugeMetricFamily("tfdist_serving_version", about, labels=["model"])
        for name, model in self._models.items():
            versions.add_metric([name], model.status.serving or 0)
        yield versions
        for key, about in _COUNTS.items():
            counter = CounterMetricFamily(f"tfdist_serving_{key}", about, labels=["model"])
            for name, model in self._models.items():
                counter.add_metric([name], model.counts[key])
            yield counter
        about = "Requests that were answered together, as each of them saw it"
        batches = HistogramMetricFamily("tfdist_serving_batch_requests", about, labels=["model"])
        for name, model in self._models.items():
            sizes = model.batches
            buckets = [
                (floatToGoString(most), sum(n for size, n in sizes.items() if size <= most))
                for most in (*_BATCHES, float("inf"))
            ]
            batches.add_metric([name], buckets, sum(size * n for size, n in sizes.items()))
        yield batches
