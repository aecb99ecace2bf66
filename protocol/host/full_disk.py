"""Detects a full disk, from an error or from its free space."""

import errno
import shutil
from pathlib import Path

MIN_FREE_BYTES = 1 << 20
"""A disk with less free space than this, bytes, counts as full."""
_CODES = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = ("No space left on device", "disk is full", "Disk quota exceeded")
"""Messages of errors without an error number, from some writers and from other ranks."""


def is_full(run_dir: Path) -> bool:
    """Return whether the disk of a run directory is full."""
    return shutil.disk_usage(run_dir).free < MIN_FREE_BYTES


def is_disk_full_error(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes reports a full disk."""
    while error is not None:
        if getattr(error, "errno", None) in _CODES or any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__
    return False


def describe_full(place: Path | str) -> str:
    """Return the message for a user when the disk of a directory is full."""
    return f"the disk of {place} is full"
