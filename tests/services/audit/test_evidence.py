"""Tests the evidence of sequential tests: how often it is wrong, how soon it is right, and since when."""

import numpy as np
import pytest

from services.audit.evidence import ALTERNATIVES, MAX_STARTS, Evidence, FalseAlarms, rate_ratios
from tests.changes import slow_unless_changed

RATE = 0.002


def run(rates: list[float], trials: int, generator: np.random.Generator) -> tuple[float, Evidence]:
    """Collect evidence of steps with these rates; returns its largest log as well."""
    evidence, largest = Evidence(len(ALTERNATIVES)), 0.0
    for step, rate in enumerate(rates):
        evidence.add(step, rate_ratios(int(generator.binomial(trials, rate)), trials, RATE))
        largest = max(largest, evidence.log)
    return largest, evidence


@slow_unless_changed("services/audit/", "tests/services/audit/")
def test_evidence_without_a_fault_exceeds_one_over_a_in_a_share_of_a_of_the_runs_at_most() -> None:
    generator = np.random.default_rng(0)
    largest = np.array([run([RATE] * 60, 50, generator)[0] for _ in range(1000)])
    for chance in (0.2, 0.05, 0.01):
        assert (largest >= np.log(1 / chance)).mean() <= chance


def test_evidence_is_found_within_three_steps_after_a_long_clean_past() -> None:
    generator = np.random.default_rng(1)
    for past in (0, 10, 300):
        largest, evidence = run([RATE / 10] * past + [0.2] * 3, 100, generator)
        assert largest > np.log(1e3)
        assert past - 1 <= evidence.since <= past + 2
        assert len(evidence._starts) <= MAX_STARTS


def test_expectation_of_every_ratio_is_at_most_one_for_smaller_rates() -> None:
    hit, miss = np.exp(rate_ratios(1, 1, RATE)), np.exp(rate_ratios(0, 1, RATE))
    for rate in (0.0, RATE / 2, RATE):
        assert (rate * hit + (1 - rate) * miss <= 1 + 1e-12).all()
    assert (0.1 * hit + 0.9 * miss > 1).all()


def test_evidence_of_no_step_is_one() -> None:
    assert (Evidence(3).log, Evidence(3).since) == (0.0, -1)


def test_chances_of_all_hypotheses_add_up_to_the_allowed_rate() -> None:
    alarms = FalseAlarms(1e-3)
    limits = [alarms.limit(f"hypothesis {n}") for n in range(1000)]
    assert sum(np.exp(-limit) for limit in limits) == pytest.approx(1e-3 * 1000 / 1001)
    assert alarms.limit("hypothesis 0") == limits[0]
