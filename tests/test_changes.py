"""Tests which files count as changed, and what a test is marked with that depends on them."""

import subprocess
from pathlib import Path

import pytest

from tests import changes
from tests.changes import SINCE, changed_files, changes_here, have_changed, slow_unless_changed


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of two commits, of which the second changes nothing."""
    git(tmp_path, "init", "-q")
    for name in ("kept", "edited", "removed", "moved"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "commit", "-qm", "two", "--allow-empty")
    return tmp_path


def test_changed_files_are_committed_edited_removed_moved_and_new_ones(root: Path) -> None:
    assert changed_files(root, "HEAD~1") == []
    (root / "edited").write_text("otherwise\n")
    (root / "removed").unlink()
    (root / "moved").rename(root / "place")
    (root / "ignored").touch()
    found = changed_files(root, "HEAD~1")
    assert found is not None
    assert sorted(found) == ["edited", "moved", "place", "removed"]
    git(root, "add", ".")
    git(root, "commit", "-qm", "three")
    assert sorted(changed_files(root, "HEAD~1") or []) == sorted(found)
    assert changed_files(root, "HEAD") == []


def test_without_the_commit_before_nothing_is_known_to_be_unchanged(root: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{root}", str(clone)], check=True)
    assert changed_files(clone, "HEAD~1") is None
    (tmp_path / "clone/.git").rename(tmp_path / "clone/away")
    assert changed_files(tmp_path / "nowhere", "HEAD~1") is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], False),
        (["trainer/hosts_of.py", "docs/trainer/hosts/a"], False),
        (["a", "trainer/hosts/new.py"], True),
        (None, True),
    ],
)
def test_beginnings_have_changed_where_a_path_begins_so(changed: list[str] | None, expected: bool) -> None:
    assert have_changed(("tests/house/", "trainer/hosts/"), changed) is expected


def test_path_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="no path begins with nowhere/"):
        slow_unless_changed("trainer/", "nowhere/")


def test_unknown_commit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SINCE, "no-such-commit")
    with pytest.raises(pytest.UsageError, match="CHANGED_SINCE=no-such-commit: git knows no such"):
        changes_here.__wrapped__()


@pytest.mark.parametrize("beginnings", [changes.SGLANG, changes.VLLM, changes.PAGES])
def test_mark_is_slow_or_changed(beginnings: tuple[str, ...]) -> None:
    name = "changed" if have_changed(beginnings, changes_here()) else "slow"
    assert slow_unless_changed(*beginnings).name == name
