"""Starts a run again with other settings, as a user does: what takes effect, what is refused."""

from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import CommitEvent
from services.ledger.event_log.reader import read_events
from services.settings.load import run_settings
from tests.integration.command import audit, tether_here, tether_up
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")
FAST = ("trainer.step_s=0.01", "engine.seconds_per_token=0.001", "monitor.enabled=false")


def words(run_dir: Path, steps: int, *overrides: str) -> list[str]:
    options = [word for override in (*FAST, *overrides) for word in ("--set", override)]
    return [CONFIG, "--run-dir", str(run_dir), "--steps", str(steps), *options]


@pytest.mark.timeout(600)
def test_a_run_goes_on_with_other_settings_and_refuses_another_model(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "up.log"

    def up(steps: int, *overrides: str) -> str:
        with tether_up(*words(run_dir, steps, *overrides), output=out) as process:
            code = process.wait(250)
        assert code == 0, out.read_text()
        return out.read_text()

    assert f"run stragglers in {run_dir}: 2 steps, E=1, B=8, mask\n" in up(2)
    before = sorted((path, path.read_bytes()) for path in run_dir.rglob("*") if path.is_file())
    refused = tether_here("up", *words(run_dir, 4, "bound.max_staleness=3", "model.scratch.seed=1"))
    assert refused.returncode == 2
    assert "setting model.scratch.seed is 0 in the run and 1 now, and cannot change" in refused.stderr
    assert sorted((path, path.read_bytes()) for path in run_dir.rglob("*") if path.is_file()) == before
    said = up(4, "bound.max_staleness=3", "bound.groups_per_step=4", "optimizer.lr=5e-6")
    assert f"run stragglers in {run_dir}: 4 steps, E=3, B=4, mask, resumes at version 2\n" in said
    listed = next(line for line in said.splitlines() if line.startswith("changed since the last start: "))
    for change in (
        "optimizer.lr 1e-05 -> 5e-06",
        "bound.max_staleness 1 -> 3",
        "bound.groups_per_step 8 -> 4",
        "run.steps 2 -> 4",
    ):
        assert change in listed
    commits = [event for event in read_events(run_dir / FILE) if isinstance(event, CommitEvent)]
    assert [len(event.groups) for event in commits] == [8, 8, 4, 4]
    assert run_settings(run_dir).optimizer.lr == 5e-6
    result = audit(run_dir)
    assert (result["code"], result["violations"]) == (0, [])
