"""The engine `megatron` in a run as users start it."""

from pathlib import Path

import pytest

from services.run_record.steps import read_steps
from tests.integration.command import audit, processes_of, tether_up
from tests.integration.loop import ROOT

STEPS = 8


@pytest.mark.engine
@pytest.mark.slow
def test_the_demo_learns_on_the_engine_megatron_within_the_bound(tmp_path: Path) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    overrides = ("engine.name=megatron", f"run.steps={STEPS}", "eval.at_end=false", "services.restarts=0")
    words = [word for override in overrides for word in ("--set", override)]
    with tether_up(
        str(ROOT / "deploy/configs/demo.toml"), "--run-dir", str(run_dir), *words, output=output
    ) as process:
        assert process.wait(250) == 0, output.read_text()
    found = audit(run_dir)
    assert (found["code"], found["violations"]) == (0, [])
    rewards = [row["reward_mean"] for row in read_steps(run_dir / "metrics.jsonl")]
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.1
    assert processes_of(run_dir) == []
