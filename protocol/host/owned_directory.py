"""Creates weight directories in shared memory, each with an owner whose life the kernel tracks.

    DIRECTORY/owner.pid   pid of the trainer, which locks the file while it lives

The lock ends with the process, and is visible from every pid namespace.
"""

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from protocol.errors import WeightError
from protocol.host.file_lock import try_lock

SHARED_MEMORY = Path("/dev/shm")
OWNER = "owner.pid"


def claim(directory: Path) -> tuple[Path, int]:
    """Create `directory` and lock its owner file; return the directory and the lock's descriptor.

    Raises:
        WeightError: another live process owns the directory.
        OSError: the directory cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    owner = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    if not try_lock(owner):
        pid = os.read(owner, 32).decode(errors="replace")
        os.close(owner)
        raise WeightError(
            f"{directory} belongs to the trainer with pid {pid or '?'}, which is alive: "
            "set another weights.directory for each run"
        )
    os.truncate(owner, 0)
    os.write(owner, str(os.getpid()).encode())
    return directory, owner


def claim_shared(run: str) -> tuple[Path, int]:
    """Create and claim a new directory in shared memory; first remove directories of the run's dead trainers.

    The directory gets its final name after it is locked. Otherwise another trainer could mistake it for a
    dead trainer's directory.

    Raises:
        OSError: the directory cannot be created.
    """
    remove_dead(run)
    final = SHARED_MEMORY / f"tether-{run}-{secrets.token_hex(4)}"
    aside, owner = claim(final.with_name(final.name + ".tmp"))
    aside.rename(final)
    return final, owner


def remove_dead(run: str) -> list[Path]:
    """Remove the run's directories in shared memory whose owner has ended; return the remaining ones.

    Raises:
        OSError: shared memory cannot be listed.
    """
    directories = shared_directories(run)
    for path in directories:
        if _is_dead(path):
            with suppress(FileNotFoundError):  # another process of the run removed it first
                shutil.rmtree(path)
    return [path for path in directories if path.exists()]


def shared_directories(run: str) -> list[Path]:
    """Return the run's directories in shared memory, including unfinished (.tmp) and ownerless ones.

    Raises:
        OSError: shared memory cannot be listed.
    """
    name = re.compile(rf"tether-{re.escape(run)}-[0-9a-f]{{8}}(\.tmp)?")
    return [path for path in SHARED_MEMORY.iterdir() if name.fullmatch(path.name)]


def _is_dead(directory: Path) -> bool:
    """Return whether the directory has an owner file that no process has locked."""
    with suppress(OSError):
        owner = os.open(directory / OWNER, os.O_RDWR)
        try:
            return try_lock(owner)
        finally:
            os.close(owner)
    return False
