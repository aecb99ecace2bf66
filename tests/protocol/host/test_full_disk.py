"""Tests what counts as a full disk."""

from pathlib import Path

import pytest

from protocol.errors import SpoolError, TetherError
from protocol.host import full_disk
from protocol.host.full_disk import is_disk_full_error, is_full


def refused_by_a_full_disk() -> TetherError:
    """An error as checkpoints wrap it."""
    try:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")
    except OSError as error:
        wrapped = TetherError("checkpoint step_00000003")
        wrapped.__cause__ = error
    return wrapped


def test_an_error_is_followed_to_its_cause() -> None:
    assert is_disk_full_error(refused_by_a_full_disk())
    assert is_disk_full_error(TetherError("rank 3: I/O error: No space left on device (os error 28)"))
    assert is_disk_full_error(SpoolError("spool x: cannot write: database or disk is full"))
    assert not is_disk_full_error(SpoolError("spool x: cannot write: attempt to write a readonly database"))
    assert not is_disk_full_error(None)


def test_a_disk_is_full_without_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_full(tmp_path)
    monkeypatch.setattr(full_disk, "MIN_FREE_BYTES", 1 << 70)
    assert is_full(tmp_path)
