"""Tests that the times in the reports of a real run add up."""

from pathlib import Path

import pytest

from tests.integration.loop import run_to_end, settings_for

PARTS = ("wait_s", "train_s", "publish_s", "checkpoint_s", "other_s")


async def test_parts_of_every_step_are_the_time_since_the_one_before(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, "stragglers.toml", "run.steps=4", "trainer.checkpoint_every=2", "trainer.step_s=0",
        "engine.seconds_per_token=0.001",
    )  # fmt: skip
    steps = (await run_to_end(settings)).steps
    assert len(steps) == 4
    for step in steps:
        assert sum(step[name] for name in PARTS) == pytest.approx(step["step_s"], abs=1e-6)
        assert min(step[name] for name in PARTS) >= 0.0
        assert step["tokens_per_s"] > 0
        assert step["mfu"] is None  # the scripted backend computes nothing
    # the checkpoint of version 2, which step 2 starts from
    assert steps[0]["checkpoint_s"] == 0 < steps[2]["checkpoint_s"]
