"""A thousand sessions in virtual time: the bound holds, and none is left without an end."""

import pytest

from protocol.staleness import Policy
from tests.trials.simulation.sessions import SessionScenario, SessionWorld

ENDS = {
    Policy.WAIT: {"trained", "episode_s", "episode"},
    Policy.MASK: {"trained", "masked", "all masked", "stale", "episode_s", "episode"},
    Policy.DROP: {"trained", "straggler", "episode_s", "episode"},
}


@pytest.mark.parametrize("policy", list(Policy))
async def test_every_session_ends_within_the_bound_or_with_a_reason(policy: Policy) -> None:
    scenario = SessionScenario(
        groups=250, samples=4, groups_per_step=8, slots=4, policy=policy, max_staleness=2, seed=1,
        episode_ms=600_000,
    )  # fmt: skip
    world = SessionWorld(scenario)
    outcome = await world.run()
    assert outcome.audit.violations == []
    assert max(outcome.lags) == outcome.audit.max_lag <= 2
    sessions = [session for group in world.fleet.sessions.values() for session in group]
    assert len(sessions) == 1000
    ends = {session.outcome for session in sessions}
    assert {"trained", "episode_s"} <= ends <= ENDS[policy]
    assert max(session.length_ms for session in sessions) <= scenario.episode_ms
    assert max(world.waited) <= 2  # steps in which a scored group waits for its own
    versions = max(len(session.counts) for session in sessions)
    assert versions > 3 if policy is Policy.MASK else versions <= 3
