"""The lock of the device that trainer and engines share: an flock on a file of the run directory, which the
kernel drops with its holders.

Engines hold it shared, the trainer alone. It belongs to the open file, not to a process: whoever else has
that file open (ranks, an engine's own processes: `protocol/host/fd_passing.py`) holds it too, so it is free
only when all of them have left the device or ended.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.fd_passing import FdServer, receive_fd

FILE = "device.lock"


class DeviceLock:
    """One side's handle on the lock. Nothing here waits."""

    def __init__(self, run_dir: Path, handle: int | None = None) -> None:
        """Open the lock's file, or use `handle`, on which another process has it open already.

        Raises:
            SettingsError: the file cannot be made.
        """
        self.path = run_dir / FILE
        self._giver: FdServer | None = None
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644) if handle is None else handle
        except OSError as error:
            raise SettingsError(
                f"{self.path}: {error.strerror}; a colocated run keeps the lock of its device there"
            ) from error

    def allow_children(self) -> None:
        """Let processes that this one starts hold the lock with it, from now on.

        Raises:
            SettingsError: it gives another one already.
        """
        try:
            self._giver = self._giver or FdServer(self._handle)
        except OSError as error:
            raise SettingsError(
                f"{self.path}: this process cannot give its lock to those that it starts: {error}"
            ) from error

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Take the lock if nobody is in the way. Nothing changes if it is held already, as it is asked for.

        Raises:
            SettingsError: the file system has no such locks.
        """
        try:
            fcntl.flock(self._handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SettingsError(
                f"{self.path} cannot be locked ({error.strerror}): a colocated run needs a run directory on a file system with flock"
            ) from error
        return True

    def release(self) -> None:
        """Give the lock up, for all who hold it with us: nothing of ours may be on the device any more."""
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close our handle; the lock stays held while somebody who was given it lives. Idempotent."""
        if self._giver is not None:
            self._giver.close()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def holders(self) -> dict[int, str]:
        """Processes that hold the lock, as far as they can be seen from here: pid -> name."""
        found: dict[int, str] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to somebody else
                if any(self._holds(directory, handle) for handle in os.listdir(directory / "fd")):
                    found[int(directory.name)] = (directory / "comm").read_text().strip()
        return found

    def _holds(self, process: Path, handle: str) -> bool:
        """Whether a handle of a process is on our file, and locked."""
        with suppress(OSError):
            if os.path.samestat((process / "fd" / handle).stat(), self.path.stat()):
                return "FLOCK" in (process / "fdinfo" / handle).read_text()
        return False


def given_device(run_dir: Path) -> DeviceLock | None:
    """For a trainer's rank: the handle that all ranks share, if the process that started them gives one."""
    handle = receive_fd(os.getppid())
    return None if handle is None else DeviceLock(run_dir, handle)
