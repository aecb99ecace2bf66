"""One pool and one trainer in virtual time: what withholding leases that rule F allows does."""

import pytest

from protocol.staleness import Bound, Policy
from tests.trials.simulation.admission import ADMISSIONS
from tests.trials.simulation.waves import Setting, Waves, row

STEPS = 40


@pytest.mark.parametrize("policy", [Policy.WAIT, Policy.DROP])
@pytest.mark.parametrize("colocated", [False, True])
def test_trained_tokens_are_within_the_bound_under_every_admission(policy: Policy, colocated: bool) -> None:
    for admission in ADMISSIONS:
        setting = Setting(Bound(1, 4, policy), 15.0, colocated, admission, steps=STEPS)
        assert max(Waves(setting).run().lags) <= 1


def test_no_admission_is_faster_than_rule_f_alone_under_wait() -> None:
    settings = [Setting(Bound(1, 4, Policy.WAIT), 15.0, admission=name, steps=STEPS) for name in ADMISSIONS]
    rates = {setting.admission: row(setting, 1)["steps_per_h"] for setting in settings}
    assert rates["greedy"] == pytest.approx(max(rates.values()))
