"""Tests that a run whose host is lost is resumed elsewhere from its copy."""

import dataclasses
import shutil
from pathlib import Path

from services.run_record.steps import read_steps
from services.runtime.run_copies import CopyState, fetch_run, write_copy_state
from tests.changes import slow_unless_changed
from tests.integration.loop import run_to_end, settings_for
from trainer.storage.remote import RemoteDirectory

FAST = ("trainer.step_s=0.01", "engine.seconds_per_token=0.001", "trainer.checkpoint_every=2")


@slow_unless_changed("trainer/storage/", "services/trainer/", "services/run_record/")
async def test_a_run_goes_on_from_its_copy_on_an_empty_host(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    first = settings_for(tmp_path / "lost", "stragglers.toml", *FAST, f"run.remote={url}", "run.steps=4")
    before = await run_to_end(first)
    assert before.status.version == 4
    assert RemoteDirectory(url).versions() == [2, 4]
    exports = {path.name for path in (tmp_path / "remote/exports").iterdir()}
    assert exports == {"step_00000002", "step_00000004"}

    second = settings_for(tmp_path / "new", "stragglers.toml", *FAST, f"run.remote={url}", "run.steps=6")
    assert fetch_run(second) == f"fetched version 4 of the run from {url}"
    after = await run_to_end(second)
    assert after.status.version == 6
    assert [step["step"] for step in read_steps(tmp_path / "new/metrics.jsonl")] == list(range(6))
    assert after.steps[:4] == before.steps
    assert (after.audit.steps, after.audit.max_lag <= after.audit.bound) == (6, True)
    (rebuilt,) = (event for event in after.events if event["event"] == "rebuild")
    assert rebuilt["version"] == 4
    assert RemoteDirectory(url).versions() == [4, 6]

    shutil.rmtree(tmp_path / "remote")
    write_copy_state(
        tmp_path / "new", "remote", CopyState(6, "not copied yet", url)
    )  # of a trainer that was killed
    await run_to_end(dataclasses.replace(second, run=dataclasses.replace(second.run, steps=8)))
    assert RemoteDirectory(url).versions() == [6, 8]
