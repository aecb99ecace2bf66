"""Writes files so that a reader, or a crash, never sees half of one."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file's bytes, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
