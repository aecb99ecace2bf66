"""One pool and one trainer in virtual time: what withholding leases that rule F allows does."""

from dataclasses import replace

import pytest

from protocol.staleness import Bound, Policy
from tests.trials.simulation.admission import ADMISSIONS
from tests.trials.simulation.fuller_waves import SAMPLES, WAYS, bias
from tests.trials.simulation.waves import Setting, Waves, row

STEPS = 40


@pytest.mark.parametrize("policy", [Policy.WAIT, Policy.DROP])
@pytest.mark.parametrize("colocated", [False, True])
def test_trained_tokens_are_within_the_bound_under_every_admission(policy: Policy, colocated: bool) -> None:
    for admission in ADMISSIONS:
        setting = Setting(Bound(1, 4, policy), 15.0, colocated, admission, steps=STEPS)
        assert max(Waves(setting).run().lags) <= 1


@pytest.mark.parametrize("policy", [Policy.WAIT, Policy.DROP])
def test_trained_tokens_are_within_the_bound_whatever_fills_the_waves(policy: Policy) -> None:
    setting = Setting(
        Bound(1, 4, policy), 15.0, steps=STEPS, samples=SAMPLES, width=SAMPLES, slots=2.0 * SAMPLES
    )
    for way in ({}, *WAYS.values()):
        tally = Waves(replace(setting, **way)).run()  # type: ignore[arg-type]
        assert max(tally.lags) <= 1
        assert bool(tally.cancelled) == ("keep" in way)


def test_samples_that_finish_first_are_shorter_and_steps_come_faster() -> None:
    setting = Setting(Bound(1, 4, Policy.WAIT), 5.0, steps=STEPS, samples=SAMPLES, width=SAMPLES)
    kept, cancelled = bias(replace(setting, keep=6), 1)
    assert kept < 1 < cancelled
    assert row(replace(setting, keep=6), 1)["steps_per_h"] > row(setting, 1)["steps_per_h"]


def test_no_admission_is_faster_than_rule_f_alone_under_wait() -> None:
    settings = [Setting(Bound(1, 4, Policy.WAIT), 15.0, admission=name, steps=STEPS) for name in ADMISSIONS]
    rates = {setting.admission: row(setting, 1)["steps_per_h"] for setting in settings}
    assert rates["greedy"] == pytest.approx(max(rates.values()))
