"""Makes the working directories of programs, and clears away those of workers that were killed.

Each directory is locked (flock) by the worker whose program works in it, for as long as that worker lives. So
a directory whose lock is free belongs to nobody.
"""

import fcntl
import logging
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("tether.programs")

PREFIX = "tether-program-"


class ProgramFolder:
    """A new empty directory that is removed by `close`."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
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
    """Remove directories whose workers have died, and kill what still works in them; return how many.

    That is what a killed worker's program started: the program itself has died with its worker.
    """
    count = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                killed = _kill_those_in(path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
            log.warning("program.left folder=%s killed=%d", path, killed)
            count += 1
    return count


def _kill_those_in(folder: Path) -> int:
    """Kill the processes whose working directory is in a directory; return how many."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            process = os.pidfd_open(int(entry.name))  # so that the signal cannot reach another process
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder.resolve()):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    count += 1
            finally:
                os.close(process)
    return count
