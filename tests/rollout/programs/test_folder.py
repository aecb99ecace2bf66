"""Directories of programs: only one that nobody works in is removed."""

import tempfile
from pathlib import Path

import pytest

from rollout.programs.folder import PREFIX, ProgramFolder, clear_left_folders


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_with_what_is_in_it() -> None:
    folder = ProgramFolder()
    (folder.path / "more").mkdir()
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_only_a_folder_that_nobody_has_is_cleared(temporary: Path) -> None:
    used = ProgramFolder()
    (temporary / f"{PREFIX}left").mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary)
    (temporary / "other").mkdir()
    assert (clear_left_folders(), clear_left_folders()) == (1, 0)
    assert sorted(path.name for path in temporary.iterdir()) == sorted(
        [used.path.name, f"{PREFIX}file", f"{PREFIX}link", "other"]
    )
    used.close()
