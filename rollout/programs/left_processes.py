"""Finds all processes that a program has started, and kills them.

A process can leave its parent, its process group and its directory. Its children inherit its environment
unless they take care: each program has a variable `MARK` there with an unguessable value.
"""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "TETHER_PROGRAM"
"""Variable in a program's environment; its value is the name of the program's directory."""
ROUNDS = 20
"""How often to search for processes that were started meanwhile."""
DEEPEST = 64
"""Directories above a process's own that are compared."""
Identity = tuple[int, int]
"""Device and inode of a directory."""


class Sweeper:
    """Kills what ended programs have left; one search of all processes serves all that wait for it."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._searching = asyncio.Lock()

    async def sweep(self, folder: Path) -> None:
        """Return when what was left of the program of a directory is killed."""
        self._folders.add(folder)
        async with self._searching:
            if folder in self._folders:  # else a search that began later has included it
                folders, self._folders = self._folders, set()
                await asyncio.to_thread(kill_left, folders)


def kill_left(folders: Iterable[Path]) -> int:
    """Kill processes that have the mark of one of these directories or work in it; return their number.

    Processes of other users are not found, nor processes without the mark in another directory and process
    group.

    Args:
        folders: directories in one that only this user can change.
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


def _kill_once(marks: set[bytes], places: set[Identity], known: set[int]) -> set[int]:
    """Kill the processes that one search finds, except ones killed before; return their ids."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in known or int(name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            if not _is_left(name, marks, places):
                continue
            process = os.pidfd_open(int(name))  # so that the signal cannot reach another process
            try:
                if _is_left(name, marks, places):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    found.add(int(name))
            finally:
                os.close(process)
    return found


def _is_left(name: str, marks: set[bytes], places: set[Identity]) -> bool:
    """Return whether a process has one of the marks, or works in or below one of the directories."""
    if places and not places.isdisjoint(_surrounding(f"/proc/{name}/cwd")):
        return True
    with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
        environ = file.read()
    return MARK.encode() in environ and not marks.isdisjoint(environ.split(b"\0"))


def _surrounding(directory: str) -> Iterator[Identity]:
    """Yield a directory and those above it, as the kernel finds them: names may be exchanged meanwhile."""
    last = None
    for _ in range(DEEPEST):
        found = _identity(directory)
        if found == last:  # the root
            return
        yield found
        last, directory = found, f"{directory}/.."


def _identity(directory: str | Path) -> Identity:
    found = os.stat(directory)
    return found.st_dev, found.st_ino
