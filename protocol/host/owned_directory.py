"""Creates weight directories in shared memory, each with an owner whose life the kernel tracks.

    DIRECTORY/owner.pid   pid of the trainer, which locks the file while it lives
    DIRECTORY/run         device and inode of the run's directory, which tell runs of one name apart

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
RUN = "run"


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


def claim_shared(run: str, run_dir: Path | None = None) -> tuple[Path, int]:
    """Create and claim a new directory in shared memory; first remove directories of the run's dead trainers.

    The directory gets its final name after it is locked. Otherwise another trainer could mistake it for a
    dead trainer's directory.

    Args:
        run: name of the run.
        run_dir: directory of the run, for `shared_directories`.

    Raises:
        OSError: the directory cannot be created.
    """
    remove_dead(run)
    final = SHARED_MEMORY / f"tether-{run}-{secrets.token_hex(4)}"
    aside, owner = claim(final.with_name(final.name + ".tmp"))
    if run_dir is not None:
        (aside / RUN).write_text(_identity(run_dir))
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


def shared_directories(run: str, run_dir: Path | None = None) -> list[Path]:
    """Return the directories in shared memory of a run's name, with unfinished (.tmp) and ownerless ones.

    With `run_dir`, return only the directories of the run in that directory.

    Raises:
        OSError: shared memory cannot be listed, or a directory is being removed.
    """
    name = re.compile(rf"tether-{re.escape(run)}-[0-9a-f]{{8}}(\.tmp)?")
    found = [path for path in SHARED_MEMORY.iterdir() if name.fullmatch(path.name)]
    if run_dir is None:
        return found
    marked = [path for path in found if (path / RUN).exists()]
    return [path for path in marked if (path / RUN).read_text() == _identity(run_dir)]


def _is_dead(directory: Path) -> bool:
    """Return whether the directory has an owner file that no process has locked."""
    with suppress(OSError):
        owner = os.open(directory / OWNER, os.O_RDWR)
        try:
            return try_lock(owner)
        finally:
            os.close(owner)
    return False


def _identity(run_dir: Path) -> str:
    """Return device and inode of a directory, which stay the same if the directory is moved."""
    found = run_dir.stat()
    return f"{found.st_dev} {found.st_ino}"
