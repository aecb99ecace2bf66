"""Names, writes and retires the directories of published versions, for the transports that keep files."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from protocol.host.atomic_file import directory_written_aside
from protocol.messages import WeightManifest

VERSION_NAME = re.compile(r"v(\d{8,})-([0-9a-zA-Z_-]+)")
MANIFEST = "manifest.json"
"""A version's manifest, in its directory."""


def write_manifest(manifest: WeightManifest, directory: Path) -> None:
    """Write the manifest of a version into its directory. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(data)


def read_manifests(directory: Path) -> list[WeightManifest]:
    """Return the manifests of the versions in a directory, the one that was written last at the end."""
    found = []
    for path in directory.glob("v*"):
        if not VERSION_NAME.fullmatch(path.name):
            continue
        try:
            data = (path / MANIFEST).read_bytes()
            time_ns = path.stat().st_mtime_ns
            manifest = msgspec.json.decode(data, type=WeightManifest)
        except (OSError, msgspec.MsgspecError):  # being removed
            continue
        manifest = msgspec.structs.replace(manifest, location=str(path))
        found.append((time_ns, manifest.version, manifest))
    return [manifest for _, _, manifest in sorted(found, key=lambda item: item[:2])]


class VersionDirectories:
    """The versions in one directory, `v00000012-EPOCH` each, in the order in which they were published."""

    def __init__(self, directory: Path, keep: int, *, durable: bool) -> None:
        """Start without versions.

        Args:
            directory: holds the versions.
            keep: how many of the newest versions `retire` keeps, at least 1.
            durable: sync each version to the disk before it becomes visible.
        """
        self.directory = directory
        self._keep = max(keep, 1)
        self._durable = durable
        self._published: list[tuple[int, Path]] = []

    def adopt(self) -> None:
        """Take over the versions of an earlier process, oldest first, and remove unfinished ones."""
        found = []
        for path in self.directory.iterdir():
            if path.name.endswith(".tmp"):
                remove(path)
            elif match := VERSION_NAME.fullmatch(path.name):
                found.append((path.stat().st_mtime_ns, int(match[1]), path))
        self._published = [(version, path) for _, version, path in sorted(found)]

    @contextmanager
    def written(self, epoch: str, version: int) -> Iterator[tuple[Path, Path]]:
        """Write a version within the block; it becomes visible when the block ends.

        A version of the same name is replaced. If the block raises, what it wrote is removed.

        Yields:
            (empty directory to write to, path that it will have).

        Raises:
            OSError: the directory cannot be made or renamed.
        """
        final = self.directory / f"v{version:08d}-{epoch}"
        with directory_written_aside(final, durable=self._durable) as aside:
            yield aside, final
        self._published = [entry for entry in self._published if entry[1] != final] + [(version, final)]

    def retire(self, in_use: frozenset[int]) -> None:
        """Remove versions that are neither in use nor among the newest."""
        kept = self._published[-self._keep :]
        for entry in self._published[: -self._keep]:
            if entry[0] in in_use:
                kept.append(entry)
            else:
                remove(entry[1])
        self._published = [entry for entry in self._published if entry in kept]

    def clear(self) -> None:
        """Remove all versions."""
        for _, path in self._published:
            remove(path)
        self._published = []


def remove(path: Path) -> None:
    """Remove a directory if it exists; a reader that has mapped a file of it keeps the bytes."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
