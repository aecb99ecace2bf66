"""The staleness bound on the real loop: for every E and policy, with few long and many middling stragglers."""

from pathlib import Path

import pytest

from tests.integration.loop import run_to_end, settings_for

STRAGGLERS = {
    "few": ("engine.straggler_share=0.05", "engine.straggler_factor=20.0"),
    "many": ("engine.straggler_share=0.4", "engine.straggler_factor=10.0"),
}


@pytest.mark.parametrize("stragglers", STRAGGLERS)
@pytest.mark.parametrize("policy", ["wait", "mask", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
async def test_no_trained_token_is_over_the_bound(tmp_path: Path, bound: int, policy: str, stragglers: str) -> None:
    settings = settings_for(
        tmp_path, "stragglers.toml", f"bound.max_staleness={bound}", f"bound.staleness_policy={policy}", *STRAGGLERS[stragglers],
        "engine.seconds_per_token=0.002", "trainer.step_s=0.01", "run.steps=16", "rollout.groups_in_flight=64",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert run.audit.violations == []
    assert run.status.version == 16
    assert run.audit.max_lag <= bound
    assert max(step["lag_max"] for step in run.steps) <= bound
    if policy == "wait":
        assert run.audit.max_lag == bound
        assert run.status.dropped == 0
        assert sum(step["masked_tokens"] for step in run.steps) == 0
        assert sum(step["wait_s"] for step in run.steps) > 0
    if policy == "mask" and bound == 1:
        assert sum(step["masked_tokens"] for step in run.steps) + run.status.dropped > 0
    if policy == "drop" and bound == 1:
        assert run.status.dropped_by_reason["straggler"] > 0
