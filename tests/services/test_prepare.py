"""Tests that a run that was made from another one's record is not continued, and a full disk at the start."""

import errno
from pathlib import Path

import msgspec
import pytest

from protocol.errors import SettingsError
from services import prepare
from services.prepare import prepare_run
from services.run_record.end import PARENT, Parent
from services.settings.load import load_settings


async def test_run_that_was_made_from_a_record_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / PARENT).write_bytes(msgspec.json.encode(Parent("runs/a", 5)))
    settings = load_settings(None, [f"run.dir={tmp_path}"], environ={})
    with pytest.raises(SettingsError, match="cannot be continued: it is runs/a made again, up to version 5"):
        await prepare_run(settings, lambda: settings)
    assert [*tmp_path.iterdir()] == [tmp_path / PARENT]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # as safetensors says it
    ],
)
async def test_a_disk_that_is_full_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(prepare, "build_scratch", full)
    demo = Path(__file__).parents[2] / "deploy/configs/demo.toml"
    overrides = [f"run.dir={tmp_path / 'run'}", "ledger.url=redis://127.0.0.1:1/0"]
    settings = load_settings(str(demo), overrides, environ={})
    with pytest.raises(SettingsError, match=r"run is full: make room, then start .* again \(.*No space left"):
        await prepare_run(settings, lambda: settings)
