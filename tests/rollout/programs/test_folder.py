"""Directories of programs: only one that nobody works in is removed."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.programs.folder import PREFIX, ProgramFolder, clear_left_folders, programs_directory


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


def test_only_a_folder_that_nobody_has_is_cleared(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    used = ProgramFolder()
    place = programs_directory()
    (place / f"{PREFIX}left").mkdir()
    (place / f"{PREFIX}left" / "task.json").touch()
    (place / f"{PREFIX}fresh").mkdir()
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}link").symlink_to(temporary)
    (place / "other").mkdir()
    assert (clear_left_folders(), clear_left_folders()) == (2, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"program.left folder={place / f'{PREFIX}left'} killed=0"
    ]
    assert sorted(path.name for path in place.iterdir()) == sorted(
        [used.path.name, f"{PREFIX}file", f"{PREFIX}link", "other"]
    )
    used.close()


def test_a_folder_that_is_cleared_before_it_is_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make, cleared = tempfile.mkdtemp, []

    def make_and_clear(**where: Any) -> str:
        path = make(**where)
        if not cleared:
            cleared.append(clear_left_folders())
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_clear)
    folder = ProgramFolder()
    assert cleared == [1]
    assert folder.path.exists()
    folder.close()


def test_folders_are_where_no_other_user_can_change_or_list_them(temporary: Path) -> None:
    folder = ProgramFolder()
    assert folder.path.parent == programs_directory()
    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.path.parent)] == [0o700, 0o700]
    folder.close()


def test_folders_beside_the_directory_are_not_touched(temporary: Path) -> None:
    (temporary / f"{PREFIX}evil").mkdir()
    assert clear_left_folders() == 0
    assert (temporary / f"{PREFIX}evil").exists()


def test_a_directory_that_others_may_change_is_refused(temporary: Path) -> None:
    place = programs_directory()
    place.chmod(0o777)
    with pytest.raises(SettingsError, match="set TMPDIR"):
        ProgramFolder()
    place.rmdir()
    place.symlink_to(temporary)
    with pytest.raises(SettingsError, match="set TMPDIR"):
        clear_left_folders()
    assert [path.name for path in temporary.iterdir()] == [place.name]
