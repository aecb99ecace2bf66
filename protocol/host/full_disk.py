"""Tells whether a disk is full, from an error or by its free space."""

import errno
import shutil
from pathlib import Path

LEAST_BYTES = 1 << 20
"""A disk with less free space counts as full."""
_CODES = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = ("No space left on device", "disk is full", "Disk quota exceeded")
"""Texts of writers that raise errors without a code, and of other ranks."""


def is_full(run_dir: Path) -> bool:
    """Return whether the disk of a run directory has no room."""
    return shutil.disk_usage(run_dir).free < LEAST_BYTES


def is_for_want_of_room(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that a disk is full."""
    while error is not None:
        if getattr(error, "errno", None) in _CODES or any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__
    return False


def describe_full(place: Path | str) -> str:
    """Return the message that a user reads when the disk of a directory is full."""
    return f"the disk of {place} is full"
