"""Finds and kills all processes that a program has started.

A process can leave its parent, its process group and its directory. Its children normally inherit its
environment, in which each program has a variable `MARK` with an unguessable value.
"""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "TETHER_PROGRAM"
"""Environment variable of a program; its value is the name of the program's directory."""
ROUNDS = 20
"""Maximum number of searches for processes started meanwhile."""
DEEPEST = 64
"""Maximum number of parent directories to compare."""
Identity = tuple[int, int]
"""Device and inode of a directory."""


class Sweeper:
    """Killer of processes left by ended programs; concurrent callers share one search of all processes."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._searching = asyncio.Lock()

    async def sweep(self, folder: Path) -> None:
        """Return after the processes left by a directory's program are killed."""
        self._folders.add(folder)
        async with self._searching:
            if folder in self._folders:  # otherwise a later search has included it
                folders, self._folders = self._folders, set()
                await asyncio.to_thread(kill_left_processes, folders)


def kill_left_processes(folders: Iterable[Path]) -> int:
    """Kill processes that have the mark of a directory or work in it; return their number.

    Not found: processes of other users, and processes without the mark that work in another directory and
    process group.

    Args:
        folders: directories in a parent that only this user can modify.
    """
    folders = list(folders)
    marks = {f"{MARK}={folder.name}".encode() for folder in folders}
    places = {_identity(folder) for folder in folders if folder.is_dir() and not folder.is_symlink()}
    killed: set[int] = set()
    for _ in range(ROUNDS):
        found = _kill_once(marks, places, killed)
        if not found:
            break
        killed |= found
    return len(killed)


def _kill_once(marks: set[bytes], places: set[Identity], skip: set[int]) -> set[int]:
    """Kill the processes found by one search, except those in `skip`; return their ids."""
    killed = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in skip or int(name) == os.getpid():
            continue
        with suppress(OSError):  # process has ended or belongs to another user
            if not _is_left(name, marks, places):
                continue
            process = os.pidfd_open(int(name))  # so that the signal cannot reach another process
            try:
                if _is_left(name, marks, places):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    killed.add(int(name))
            finally:
                os.close(process)
    return killed


def _is_left(name: str, marks: set[bytes], places: set[Identity]) -> bool:
    """Return whether a process has one of the marks, or works in or below one of the directories."""
    if places and not places.isdisjoint(_surrounding(f"/proc/{name}/cwd")):
        return True
    with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
        environ = file.read()
    return MARK.encode() in environ and not marks.isdisjoint(environ.split(b"\0"))


def _surrounding(directory: str) -> Iterator[Identity]:
    """Yield a directory and its parents as the kernel resolves them: paths may be renamed meanwhile."""
    last = None
    for _ in range(DEEPEST):
        identity = _identity(directory)
        if identity == last:  # root directory
            return
        yield identity
        last, directory = identity, f"{directory}/.."


def _identity(directory: str | Path) -> Identity:
    found = os.stat(directory)
    return found.st_dev, found.st_ino
