"""Steps that a run's directory cannot give again: what is missing is named."""

import shutil
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.settings.load import run_settings
from services.tools.recorded.run import RecordedRun
from tests.services.monitor.runs import recorded_run


def test_an_absent_spool_is_named_with_the_number_of_groups_that_are_missing(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    spool = run_dir / "spool.sqlite"
    spool.unlink()
    recorded = RecordedRun(run_settings(run_dir), range(2))
    assert recorded.command(1).step == 1
    shutil.rmtree(run_dir / "archive")
    with pytest.raises(SettingsError) as refused:
        recorded.command(1)
    assert str(refused.value) == (
        f"step 1 cannot be built again: there is no file {spool}, and records of 3 of its 3 groups are "
        "missing. The archive holds no step; trainer.archive_mb limits its size"
    )
