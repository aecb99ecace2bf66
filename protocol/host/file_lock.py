"""Locks files and directories by flock(2), which the kernel drops with the last process that holds them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.01


def try_lock(handle: int, *, exclusive: bool = True) -> bool:
    """Lock an open file if nobody is in the way. A lock that is held already changes to what is asked for.

    Raises:
        OSError: the file system has no such locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Give up the lock of an open file, for all who have the same opening of it."""
    fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, *, timeout_s: float = 0.0, create: bool = False) -> Iterator[int]:
    """Hold a file or directory alone within the block.

    Args:
        path: what to lock; `create` makes an empty file if it is not there.
        timeout_s: how long to wait for another holder; 0: not at all.

    Yields:
        The descriptor that holds the lock; whoever inherits it holds the lock, too.

    Raises:
        BlockingIOError: somebody else holds it, and did until the deadline.
        OSError: it cannot be opened, or the file system has no such locks.
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
