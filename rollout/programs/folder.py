"""Makes the working directories of programs, and removes the directories that killed workers left.

They are in a directory that no other user can change or list. Each is locked (flock) by the worker whose
program works in it, for as long as that worker lives. So a directory whose lock is free belongs to no worker.
"""

import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from protocol.errors import SettingsError
from rollout.programs.left_processes import kill_left
from rollout.programs.owner import Owner

log = logging.getLogger("tether.programs")

PREFIX = "tether-program-"


class ProgramFolder:
    """A new empty directory, with a name that others cannot guess; `close` removes it."""

    def __init__(self, owner: Owner | None = None) -> None:
        """Make it for this user, or for the `owner` of the program."""
        self._owner = owner
        parent = programs_directory()
        if owner is not None:
            parent.chmod(0o711)  # the owner reaches its own, and cannot list others
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{secrets.token_hex(8)}-", dir=parent))
            with suppress(FileNotFoundError):  # another worker took it for one that was left
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    break
                os.close(self._lock)  # the same, after it was opened
        self._hand_over(self.path)

    def write(self, name: str, text: str) -> Path:
        """Write a file that the program may read and change, before the program starts; return its path."""
        path = self.path / name
        path.write_text(text, "utf-8")
        self._hand_over(path)
        return path

    def close(self) -> None:
        """Remove it."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _hand_over(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner.uid, self._owner.gid)


def programs_directory() -> Path:
    """Return the parent of programs' working directories; create it if it is missing.

    Raises:
        SettingsError: another user has made it, or may change it.
    """
    path = Path(tempfile.gettempdir()) / f"tether-programs-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SettingsError(
            f"{path} is not a directory that only user {os.getuid()} can change: remove it, or set TMPDIR"
        )
    return path


def clear_left_folders() -> int:
    """Remove directories whose workers have died, and kill what their programs left; return how many.

    The programs themselves have died with their workers.
    """
    count = 0
    for path in programs_directory().glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed or locked meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                killed, is_used = kill_left([path]), any(path.iterdir())
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
            if killed or is_used:  # else another worker may be about to lock it, and makes another one
                log.warning("program.left folder=%s killed=%d", path, killed)
            count += 1
    return count
