"""Starts a run again with other settings, as a user does: what takes effect, what is refused."""

import asyncio
from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import CommitEvent
from services.ledger.event_log.reader import read_events
from services.settings.load import dump_settings, run_settings
from tests.changes import slow_unless_changed
from tests.integration.command import audit, tether_here, tether_up
from tests.integration.loop import ROOT, run_to_end, settings_for

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")
FAST = ("trainer.step_s=0.01", "engine.seconds_per_token=0.001", "monitor.enabled=false")


def words(run_dir: Path, steps: int, *overrides: str) -> list[str]:
    options = [word for override in (*FAST, *overrides) for word in ("--set", override)]
    return [CONFIG, "--run-dir", str(run_dir), "--steps", str(steps), *options]


@slow_unless_changed("services/settings/", "services/launcher/", "services/trainer/takeover.py")
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_other_settings_and_refuses_another_model(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "up.log"

    first = settings_for(run_dir, "stragglers.toml", "run.steps=2", *FAST)
    assert asyncio.run(run_to_end(first)).status.version == 2
    dump_settings(first, run_dir / "settings.json")  # `tether up` leaves it, and a lock
    (run_dir / "lock").touch()
    before = sorted((path, path.read_bytes()) for path in run_dir.rglob("*") if path.is_file())
    refused = tether_here("up", *words(run_dir, 4, "bound.max_staleness=3", "model.scratch.seed=1"))
    assert refused.returncode == 2
    assert "setting model.scratch.seed is 0 in the run and 1 now, and cannot change" in refused.stderr
    assert sorted((path, path.read_bytes()) for path in run_dir.rglob("*") if path.is_file()) == before
    changes = ("bound.max_staleness=3", "bound.groups_per_step=4", "optimizer.lr=5e-6")
    with tether_up(*words(run_dir, 4, *changes), output=out) as process:
        code = process.wait(250)
    said = out.read_text()
    assert code == 0, said
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
