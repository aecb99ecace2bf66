"""Locks the GPU that trainer and engines share, by an flock on a file of the run directory.

Engines hold it shared, the trainer exclusively. The lock belongs to the open file, not to a process: every
process that was given the file's descriptor (ranks, an engine's own processes: `protocol/host/fd_passing.py`)
holds it too. The kernel frees it only when all of them have released the device or exited.
"""

import os
from contextlib import suppress
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.fd_passing import FdServer, receive_fd
from protocol.host.file_lock import try_lock, unlock

FILE = "device.lock"


class DeviceLock:
    """Descriptor of the lock's file, as one side holds it. No method waits."""

    def __init__(self, run_dir: Path, handle: int | None = None) -> None:
        """Open the lock's file, or use `handle`, on which another process has it open already.

        Raises:
            SettingsError: the file cannot be created.
        """
        self.path = run_dir / FILE
        self._fd_server: FdServer | None = None
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644) if handle is None else handle
        except OSError as error:
            raise SettingsError(
                f"{self.path}: {error.strerror}; a colocated run keeps the lock of its device there"
            ) from error

    def allow_children(self) -> None:
        """Let the processes that this one starts from now on hold the lock with it.

        Raises:
            SettingsError: this process already serves another lock.
        """
        try:
            self._fd_server = self._fd_server or FdServer(self._handle)
        except OSError as error:
            raise SettingsError(
                f"{self.path}: this process cannot pass its lock to its child processes: {error}"
            ) from error

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Take the lock unless another opening of the file is in the way; held already, it stays held.

        Raises:
            SettingsError: the file system does not support flock.
        """
        try:
            return try_lock(self._handle, exclusive=exclusive)
        except OSError as error:
            raise SettingsError(
                f"{self.path} cannot be locked ({error.strerror}): "
                "a colocated run needs a run directory on a file system with flock"
            ) from error

    def release(self) -> None:
        """Release the lock for all who hold it with this process; none may have memory on the device."""
        unlock(self._handle)

    def close(self) -> None:
        """Close the descriptor; the lock stays held while a process that was given it lives. Idempotent."""
        if self._fd_server is not None:
            self._fd_server.close()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def holders(self) -> dict[int, str]:
        """Return the processes that hold the lock, as far as this one may see them: pid -> command."""
        names: dict[int, str] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if any(self._holds(directory, handle) for handle in os.listdir(directory / "fd")):
                    names[int(directory.name)] = (directory / "comm").read_text().strip()
        return names

    def _holds(self, process: Path, handle: str) -> bool:
        """Return whether a descriptor of a process is on the lock's file, and locked."""
        with suppress(OSError):
            if os.path.samestat((process / "fd" / handle).stat(), self.path.stat()):
                return "FLOCK" in (process / "fdinfo" / handle).read_text()
        return False


def given_device(run_dir: Path) -> DeviceLock | None:
    """Return the lock that all ranks of a trainer share, if the process that started this rank serves one."""
    handle = receive_fd(os.getppid())
    return None if handle is None else DeviceLock(run_dir, handle)
