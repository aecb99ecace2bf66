"""Makes the working directories of programs, and clears away those of workers that were killed.

Each directory is locked (flock) by the worker whose program works in it, for as long as that worker lives. So
a directory whose lock is free belongs to nobody.
"""

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rollout.programs.left_processes import kill_left

log = logging.getLogger("tether.programs")

PREFIX = "tether-program-"


class ProgramFolder:
    """A new empty directory, with a name that nobody can guess; `close` removes it."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{secrets.token_hex(8)}-"))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)  # another worker took it for one that was left, before it was locked

    def close(self) -> None:
        """Remove it."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def clear_left_folders() -> int:
    """Remove directories whose workers have died, and kill what their programs left; return how many.

    The programs themselves have died with their workers.
    """
    count = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                killed = kill_left([path])
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
            log.warning("program.left folder=%s killed=%d", path, killed)
            count += 1
    return count
