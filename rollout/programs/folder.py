"""Creates programs' working directories, and removes directories left by killed workers.

Working directories have a parent that other users can neither modify nor list. Each is locked (flock) by its
worker for the worker's lifetime, so a directory with a free lock belongs to no worker.
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
from rollout.programs.left_processes import kill_left_processes
from rollout.programs.owner import Owner

log = logging.getLogger("tether.programs")

PREFIX = "tether-program-"


class ProgramFolder:
    """New empty directory with an unguessable name; `close` removes it."""

    def __init__(self, owner: Owner | None = None) -> None:
        """Create the directory for this user, or for the program's `owner`."""
        self._owner = owner
        parent = programs_directory()
        if owner is not None:
            parent.chmod(0o711)  # the owner may enter its own directory, but not list others
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{secrets.token_hex(8)}-", dir=parent))
            with suppress(FileNotFoundError):  # another worker removed it as a leftover
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    break
                os.close(self._lock)  # removed after it was opened
        self._hand_over(self.path)

    def write(self, name: str, text: str) -> Path:
        """Write a file that the program may read and change, before the program starts; return its path."""
        path = self.path / name
        path.write_text(text, "utf-8")
        self._hand_over(path)
        return path

    def close(self) -> None:
        """Remove the directory."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _hand_over(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner.uid, self._owner.gid)


def programs_directory() -> Path:
    """Return the parent of programs' working directories, creating it if needed.

    Raises:
        SettingsError: the directory belongs to another user, or others can modify it.
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
    """Remove directories of dead workers, and kill processes that their programs left; return the number.

    The programs themselves died with their workers.
    """
    count = 0
    for path in programs_directory().glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed or locked meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                killed, is_used = kill_left_processes([path]), any(path.iterdir())
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
            if killed or is_used:  # otherwise another worker may be creating it, and will retry
                log.warning("program.left folder=%s killed=%d", path, killed)
            count += 1
    return count
