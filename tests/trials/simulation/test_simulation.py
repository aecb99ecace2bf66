"""The bound in virtual time: heavy-tailed generation, dying engines, trainer crashes, bound changes."""

import pytest

from protocol.staleness import Policy
from tests.contracts.ledger_rig import new_run
from tests.trials.simulation.run import simulate
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.world import Outcome

ROUGH = {
    "life_ms": 900_000,
    "crash_share": 0.1,
    "rewind_share": 0.5,
    "change_share": 0.03,
    "hang_share": 0.02,
    "repeat_share": 0.05,
    "lost_share": 0.01,
    "policy_changes": True,
}
"""Much more goes wrong than in a long run."""


def check(scenario: Scenario, outcome: Outcome) -> None:
    """Check that every group is accounted for, and no trained token is over the bound of its lease."""
    assert outcome.audit.violations == []
    assert outcome.audit.issued == scenario.groups == outcome.audit.trained + outcome.audit.dropped
    assert max(outcome.lags) <= outcome.audit.bound
    assert outcome.audit.max_lag <= outcome.audit.bound


@pytest.mark.parametrize("policy", list(Policy))
async def test_no_trained_token_is_over_the_bound(policy: Policy) -> None:
    scenario = Scenario(groups=1000, seed=1, policy=policy)
    outcome = await simulate(scenario)
    check(scenario, outcome)
    assert outcome.counts["deaths"] > 0


async def test_no_trained_token_is_over_the_bound_when_much_goes_wrong() -> None:
    scenario = Scenario(groups=1500, seed=2, max_staleness=2, groups_per_step=4, policy=Policy.WAIT, **ROUGH)
    outcome = await simulate(scenario)
    check(scenario, outcome)
    assert (
        min(outcome.counts[what] for what in ("deaths", "rewinds", "changes", "late", "lost", "failed")) > 0
    )


async def test_no_trained_token_is_over_the_bound_when_most_groups_have_no_signal() -> None:
    scenario = Scenario(groups=1500, seed=6, policy=Policy.WAIT, no_signal_share=0.6, **ROUGH)
    outcome = await simulate(scenario)
    check(scenario, outcome)
    assert outcome.dropped["no_signal"] > 600
    assert outcome.counts["rewinds"] > 0


@pytest.mark.parametrize(("every", "E"), [(3, 2), (0, 3)])
async def test_no_trained_token_is_over_the_bound_where_few_versions_are_published(
    every: int, E: int
) -> None:
    scenario = Scenario(
        groups=1000,
        seed=8,
        max_staleness=E,
        groups_per_step=4,
        policy=Policy.DROP,
        publish_every=every,
        **ROUGH,
    )
    outcome = await simulate(scenario)
    check(scenario, outcome)
    assert min(outcome.counts[what] for what in ("rewinds", "changes", "late publishes")) > 0
    assert outcome.counts["commits"] > 2 * outcome.calls["publish"]


async def test_the_server_decides_as_the_oracle_does(valkey_url: str) -> None:
    scenario = Scenario(groups=800, seed=3, policy=Policy.DROP, no_signal_share=0.3, **ROUGH)
    outcome = await simulate(scenario, valkey_url, new_run())
    check(scenario, outcome)
    assert outcome.counts["rewinds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", list(Policy))
async def test_long_runs_keep_the_bound(policy: Policy) -> None:
    scenario = Scenario(groups=50_000, seed=4, policy=policy, policy_changes=True)
    check(scenario, await simulate(scenario))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_the_server_decides_as_the_oracle_does_in_a_long_run(redis_url: str) -> None:
    scenario = Scenario(groups=20_000, seed=5, policy_changes=True)
    check(scenario, await simulate(scenario, redis_url, new_run()))
