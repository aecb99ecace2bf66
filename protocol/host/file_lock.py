"""Locks files and directories with flock(2); the kernel releases the lock when its last holder exits."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.01


def try_lock(handle: int, *, exclusive: bool = True) -> bool:
    """Try to lock an open file without waiting; return whether the lock was acquired.

    A lock that this open file description already holds is converted to the requested kind.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Release the lock of an open file, for all processes that share the open file description."""
    fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, *, timeout_s: float = 0.0, create: bool = False) -> Iterator[int]:
    """Hold an exclusive lock on a file or directory within the block.

    Args:
        timeout_s: maximum time to wait for another holder, seconds; 0: do not wait.
        create: whether to create an empty file if `path` does not exist.

    Yields:
        The descriptor that holds the lock; a process that inherits the descriptor shares the lock.

    Raises:
        BlockingIOError: another process held the lock until the timeout.
        OSError: the file cannot be opened, or the file system does not support locks.
    """
    handle = os.open(path, (os.O_RDWR | os.O_CREAT) if create else os.O_RDONLY, 0o644)
    try:
        end = time.monotonic() + timeout_s
        while not try_lock(handle):
            if time.monotonic() >= end:
                raise BlockingIOError(f"{path} is held by another process")
            time.sleep(POLL_S)
        yield handle
    finally:
        os.close(handle)
