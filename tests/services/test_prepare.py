"""Tests that a run that was made from another one's record is not continued."""

from pathlib import Path

import msgspec
import pytest

from protocol.errors import SettingsError
from services.prepare import prepare_run
from services.run_record.end import PARENT, Parent
from services.settings.load import load_settings


async def test_run_that_was_made_from_a_record_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / PARENT).write_bytes(msgspec.json.encode(Parent("runs/a", 5)))
    settings = load_settings(None, [f"run.dir={tmp_path}"], environ={})
    with pytest.raises(SettingsError, match="cannot be continued: it is runs/a made again, up to version 5"):
        await prepare_run(settings, lambda: settings)
    assert [*tmp_path.iterdir()] == [tmp_path / PARENT]
