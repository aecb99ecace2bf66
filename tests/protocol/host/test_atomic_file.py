"""Files and directories written aside: complete, or unchanged."""

from pathlib import Path

import pytest

from protocol.host.atomic_file import directory_written_aside, write_atomically, written_aside


@pytest.mark.parametrize("durable", [True, False])
def test_write_atomically_replaces_contents_and_leaves_nothing_beside(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old", durable=durable)
    write_atomically(path, b"new", mode=0o600, durable=durable)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_written_aside_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(IsADirectoryError), written_aside(path) as aside:
        tmp_path.write_bytes(aside.name.encode())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_directory_written_aside_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    for name in ("old", "new"):
        with directory_written_aside(path) as aside:
            (aside / "inner").mkdir()
            (aside / "inner" / name).write_text(name)
    assert [part.name for part in (path / "inner").iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_directory_written_aside_that_raises_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(IsADirectoryError), directory_written_aside(path) as aside:
        aside.write_bytes(b"")
    assert [part.name for part in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]
