"""Defines the Prometheus metrics of a service.

Names start with `tether_`. Each process has its own registry, so that tests can create several.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class CounterCollector(Collector):
    """Exports a dictionary of counters, keyed by label values, as one metric."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[Sequence[str], float]]],
    ) -> None:
        self._name, self._help, self._labels, self._read = name, help, labels, read

    def collect(self) -> Iterable[Metric]:
        """Yield the metric with the current values."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, amount in list(self._read()):
            family.add_metric(values, amount)
        yield family


class Metrics:
    """Metrics of every service; services add others to `registry`."""

    def __init__(self, role: str) -> None:
        self.registry = CollectorRegistry()
        self.role = role
        self.events = Counter("tether_events", "Number of events, by name", ["event"], registry=self.registry)
        self.waiting = Gauge(
            "tether_waiting_seconds",
            "How long the service has been waiting, by what it waits for",
            ["what"],
            registry=self.registry,
        )
        self.busy = Gauge("tether_in_flight", "Groups held by this service", registry=self.registry)
        self.seconds = Histogram(
            "tether_work_seconds",
            "Duration of one unit of work, by kind",
            ["kind"],
            registry=self.registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

    def count(self, event: str, amount: float = 1) -> None:
        """Add `amount` to the counter of an event."""
        self.events.labels(event).inc(amount)

    def watch(self, name: str, help: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Export a dictionary of counters as the metric `name`; `read` is called at each scrape."""
        self.registry.register(
            CounterCollector(name, help, ("what",), lambda: (((what,), n) for what, n in read().items()))
        )

    def watch_labelled(
        self,
        name: str,
        help: str,
        labels: tuple[str, str],
        read: Callable[[], Mapping[tuple[str, str], float]],
    ) -> None:
        """Export counters keyed by the values of two labels; `read` is called at each scrape."""
        self.registry.register(CounterCollector(name, help, labels, lambda: read().items()))
