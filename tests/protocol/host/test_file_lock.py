"""File locks: one holder, a deadline, released when the holder exits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.host.file_lock import locked, try_lock, unlock

HOLDER = """
import os, sys
from protocol.host.file_lock import try_lock
assert try_lock(os.open(sys.argv[1], os.O_RDWR))
print("held", flush=True)
sys.stdin.read()
"""


def test_locked_refuses_a_second_holder_until_the_first_leaves(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, create=True):
        with pytest.raises(BlockingIOError, match="held by another process"), locked(path, timeout_s=0.05):
            pass
    with locked(path):
        pass


def test_try_lock_shares_with_readers_and_not_with_a_writer(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    first, second = (os.open(tmp_path / "lock", os.O_RDWR) for _ in range(2))
    try:
        assert try_lock(first, exclusive=False)
        assert try_lock(second, exclusive=False)
        assert not try_lock(second, exclusive=True)
        unlock(first)
        assert try_lock(second, exclusive=True)
    finally:
        os.close(first)
        os.close(second)


def test_locked_waits_for_a_holder_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError), locked(path):
            pass
        holder.kill()
        with locked(path, timeout_s=60):
            pass
