"""Starts a run that `tether init` wrote, from a directory whose files have the names of our packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.observability.steps import read_steps
from tests.integration.command import environment

DRY = ("engine.name=scripted", "trainer.backend=scripted", "eval.at_end=false", "monitor.enabled=false")
TRAP = "raise SystemExit('the wrong module')\n"


@pytest.mark.timeout(600)
def test_a_new_run_starts_where_files_have_our_names(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "trainer").mkdir(parents=True)
    for trap in ("reward.py", "rollout.py", "json.py", "trainer/__init__.py"):
        (work / trap).write_text(TRAP)

    def tether(*words: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "services.cli", *words],
            cwd=work, env=environment(), capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    assert "next: tether up mine/config.toml" in tether("init", "mine")
    options = [word for setting in DRY for word in ("--set", setting)]
    said = tether("up", "mine/config.toml", "--steps", "2", *options)
    assert f"run first in {work}/mine/run: 2 steps, E=1, B=32, mask" in said
    assert [step["groups"] for step in read_steps(work / "mine/run/metrics.jsonl")] == [32, 32]
