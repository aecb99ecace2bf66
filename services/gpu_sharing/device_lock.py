"""Locks the GPU that trainer and engines share, by an flock on a file in the run directory.

Engines hold a shared lock, the trainer an exclusive lock. The lock belongs to the open file, not to a
process: every process that received the file's descriptor (ranks, an engine's processes:
`protocol/host/fd_passing.py`) also holds it. The kernel frees the lock only when all of them have released
the device or exited.
"""

import os
from contextlib import suppress
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.fd_passing import FdServer, receive_fd
from protocol.host.file_lock import try_lock, unlock

FILE = "device.lock"


class DeviceLock:
    """Descriptor of the lock file on one side. No method waits."""

    def __init__(self, run_dir: Path, handle: int | None = None) -> None:
        """Open the lock file, or use `handle`, a descriptor that another process opened.

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
        """Let child processes started from now on also hold the lock.

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
        """Acquire the lock unless another open file conflicts. A held lock stays held.

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
        """Release the lock for all processes that share it; none may have memory on the device."""
        unlock(self._handle)

    def close(self) -> None:
        """Close the descriptor; other processes that received it still hold the lock. Idempotent."""
        if self._fd_server is not None:
            self._fd_server.close()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def holders(self) -> dict[int, str]:
        """Return the visible processes that hold the lock: pid -> command."""
        names: dict[int, str] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if any(self._holds(directory, handle) for handle in os.listdir(directory / "fd")):
                    names[int(directory.name)] = (directory / "comm").read_text().strip()
        return names

    def _holds(self, process: Path, handle: str) -> bool:
        """Return whether a process's descriptor refers to the lock file and is locked."""
        with suppress(OSError):
            if os.path.samestat((process / "fd" / handle).stat(), self.path.stat()):
                return "FLOCK" in (process / "fdinfo" / handle).read_text()
        return False


def inherited_device(run_dir: Path) -> DeviceLock | None:
    """Return the lock shared by all ranks of a trainer, if the process that started this rank serves it."""
    handle = receive_fd(os.getppid())
    return None if handle is None else DeviceLock(run_dir, handle)
