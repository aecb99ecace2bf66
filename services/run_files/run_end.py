"""Says from the run directory whether a `tether up` is running there, and notes how the last one ended."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.errors import TetherError
from protocol.host.atomic_file import write_atomically
from protocol.host.file_lock import try_lock
from services.runtime.errors import innermost

FILE = "ended.json"
LOCK = "lock"
"""File of the run directory that a running `tether up` holds a lock on."""


class RunEnd(msgspec.Struct, frozen=True):
    """How the last `tether up` in a directory ended."""

    time: float
    """Unix time, seconds."""
    error: str = ""
    """What ended it; empty if it was done, drained or interrupted."""


@contextlib.contextmanager
def recording_end(run_dir: Path) -> Iterator[None]:
    """Note when the block ends, and the error that ended it; while it runs there is no note."""
    path = run_dir / FILE
    path.unlink(missing_ok=True)
    error = ""
    try:
        yield
    except Exception as failure:
        cause = innermost(failure)
        error = str(cause) if isinstance(cause, TetherError) else f"{type(cause).__name__}: {cause}"
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide what ended the run
            write_atomically(path, msgspec.json.encode(RunEnd(time.time(), error)))


def read_end(run_dir: Path) -> RunEnd | None:
    """Return how the last `tether up` ended; None if one is running, was killed, or none was started."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None


def is_up(run_dir: Path) -> bool:
    """Return whether a `tether up` is running in the directory."""
    try:
        with (run_dir / LOCK).open() as file:
            return not try_lock(file.fileno(), exclusive=False)
    except FileNotFoundError:
        return False
