"""Directories of live owners stay; directories of dead ones go, whichever process asks."""

import os
from pathlib import Path

import pytest

from protocol.host import owned_directory
from protocol.host.owned_directory import OWNER, claim_shared, remove_dead


def test_only_directories_of_the_run_without_a_live_owner_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_directory, "SHARED_MEMORY", tmp_path)
    live, owner = claim_shared("run")
    dead, other, unowned = (tmp_path / f"tether-{name}" for name in ("run-0000000a", "run-b-0000000a", "run"))
    for directory in (dead, other, unowned):
        (directory / "v00000001-e").mkdir(parents=True)
        (directory / OWNER).write_text("1")
    assert remove_dead("run") == [live]
    assert sorted(tmp_path.iterdir()) == sorted([live, other, unowned])
    os.close(owner)
    assert remove_dead("run") == []
    assert sorted(tmp_path.iterdir()) == sorted([other, unowned])
