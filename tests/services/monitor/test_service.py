"""The run's Prometheus metrics: unmeasured ones have no sample; docs/metrics.md has all of them."""

import re

from prometheus_client import CollectorRegistry

from protocol.messages import Mismatch, StepReport
from services.monitor.service import RunGauges
from services.observability.metrics import Metrics
from tests.integration.loop import ROOT

DOCUMENT = (ROOT / "docs/metrics.md").read_text()


def documented(section: str) -> list[str]:
    """The names in the first column of the tables of a section of docs/metrics.md."""
    text = DOCUMENT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE)


def test_every_field_is_documented() -> None:
    assert documented("Fields of metrics.jsonl") == list(StepReport.__struct_fields__)
    assert documented("Mismatch at each lag") == list(Mismatch.__struct_fields__)


def test_every_prometheus_metric_is_documented() -> None:
    metrics, registry = Metrics("trainer"), CollectorRegistry()
    RunGauges(registry)
    known = {family.name for source in (metrics.registry, registry) for family in source.collect()}
    assert set(documented("Prometheus")) == known


def test_what_was_not_measured_has_no_sample() -> None:
    registry = CollectorRegistry()
    gauges = RunGauges(registry)

    def shown(field: str) -> float | None:
        return registry.get_sample_value("tether_step", {"field": field})

    assert registry.get_sample_value("tether_run_version") is None
    gauges.set({"version": 3}, {"entropy": 0.5, "dropped_by_reason": {"stale": 2}})
    assert registry.get_sample_value("tether_run_version") == 3
    assert (shown("entropy"), shown("loss"), shown("dropped_for_stale")) == (0.5, None, 2)
    gauges.set({"version": 4}, {"entropy": None, "loss": 0.1})
    assert (shown("entropy"), shown("loss"), shown("dropped_for_stale")) == (None, 0.1, None)


def test_each_engine_has_its_own_samples() -> None:
    registry = CollectorRegistry()
    engines = [
        {"engine": "rollout.0.a", "name": "rollout.0", "running": 3, "kv_use": 0.5, "prefix_hits": 0.75},
        {"engine": "rollout.1.b", "name": "rollout.1", "running": 0, "kv_use": None, "prefix_hits": None},
    ]
    RunGauges(registry).set({"engines": engines}, {})
    assert [
        registry.get_sample_value(f"tether_engine_{name}", {"engine": engine["name"]})
        for engine in engines
        for name in RunGauges.ENGINE
    ] == [3, 0.5, 0.75, 0, None, None]
