"""One rollout worker holds as many open sessions as it leases."""

from pathlib import Path

import pytest

from tests.integration import crowd
from tests.integration.loop import run_to_end, settings_for


@pytest.mark.slow
async def test_one_worker_holds_two_thousand_open_sessions(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, "stragglers.toml", "environment.name=agent", "reward.verifiers=[]", "run.steps=1",
        'environment.options={function="tests.integration.crowd:solve"}', "environment.attempts=1",
        "bound.max_staleness=0", "bound.groups_per_step=250", "sampling.samples_per_prompt=8",
        "rollout.groups_in_flight=250", "engine.max_running=4096", "engine.seconds_per_token=0.0",
    )  # fmt: skip
    assert settings.rollout.groups_in_flight * settings.sampling.samples_per_prompt == crowd.CROWD
    run = await run_to_end(settings)
    assert crowd.most == crowd.CROWD
    assert (run.status.version, run.status.dropped, run.audit.violations) == (1, 0, [])
