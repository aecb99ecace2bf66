"""Tests what a process exports."""

from prometheus_client import generate_latest

from services.observability.metrics import Metrics


def test_counters_by_two_labels_are_exported_as_they_are_now() -> None:
    metrics, counts = Metrics("reward"), {("judge", "requests"): 2.0}
    metrics.watch_labelled("tether_verifier", "Calls of verifiers", ("verifier", "what"), lambda: counts)
    counts["judge", "cost"] = 0.25
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert 'tether_verifier_total{verifier="judge",what="requests"} 2.0' in lines
    assert 'tether_verifier_total{verifier="judge",what="cost"} 0.25' in lines
