"""Directories of published versions: named, written aside, renamed, retired. For the transports that keep
versions as files."""

import re
import shutil
from pathlib import Path

VERSION_NAME = re.compile(r"v(\d{8,})-([0-9a-zA-Z_-]+)")


class VersionDirectories:
    """The versions in one directory, `v00000012-EPOCH` each, in the order in which they were published."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = max(keep, 1)
        self._published: list[tuple[int, Path]] = []

    def adopt(self) -> None:
        """Take over what an earlier process published here, oldest first, and remove what it did not
        finish."""
        found = []
        for path in self.directory.iterdir():
            if path.name.endswith(".tmp"):
                remove(path)
            elif match := VERSION_NAME.fullmatch(path.name):
                found.append((path.stat().st_mtime_ns, int(match[1]), path))
        self._published = [(version, path) for _, version, path in sorted(found)]

    def begin(self, epoch: str, version: int) -> tuple[Path, Path]:
        """(empty directory to write to, path that it will have)."""
        final = self.directory / f"v{version:08d}-{epoch}"
        aside = final.with_name(final.name + ".tmp")
        remove(aside)
        aside.mkdir(parents=True)
        return aside, final

    def finish(self, aside: Path, final: Path, version: int) -> None:
        """Make a written version visible. One of the same name is replaced."""
        remove(final)
        aside.rename(final)
        self._published = [entry for entry in self._published if entry[1] != final] + [(version, final)]

    def retire(self, in_use: frozenset[int]) -> None:
        """Remove versions that are neither in use nor among the newest."""
        newest = self._published[-self._keep :]
        for entry in self._published[: -self._keep]:
            if entry[0] in in_use:
                newest.append(entry)
            else:
                remove(entry[1])
        self._published = [entry for entry in self._published if entry in newest]

    def clear(self) -> None:
        """Remove all versions."""
        for _, path in self._published:
            remove(path)
        self._published = []


def remove(path: Path) -> None:
    """Remove a directory if it is there. A reader that has a file of it mapped keeps its bytes."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
