"""Names, writes and retires the directories of published versions, for the transports that keep files."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from protocol.errors import WeightError
from protocol.host.atomic_file import directory_written_aside
from protocol.messages import WeightManifest
from protocol.weights.buckets import bucket_name
from protocol.weights.deltas import INDEX, Delta, changes_name
from trainer.config import WeightConfig

VERSION_NAME = re.compile(r"v(\d{8,})-([0-9a-zA-Z_-]+)")
MANIFEST = "manifest.json"
"""A version's manifest, in its directory."""


def versions_in(config: WeightConfig, run_dir: Path) -> Path:
    """Return where disk and http write the versions of a run, by this host's path."""
    return Path(config.directory) if config.directory else run_dir / "weights"


def bucket_path(directory: Path, index: int) -> Path:
    """Return the file of a version's bucket."""
    return directory / bucket_name(index)


def write_manifest(manifest: WeightManifest, directory: Path) -> None:
    """Write the manifest of a version into its directory. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(data)


def files_of(version: Path) -> Iterator[Path]:
    """Yield the files that a version names: a listing may lack what another host wrote. Raises OSError."""
    manifest = msgspec.json.decode((version / MANIFEST).read_bytes(), type=WeightManifest)
    names = [bucket_name(index) for index in range(len(manifest.buckets))]
    if manifest.chain and (manifest.chain[-1].apart or len(manifest.chain) > 1):
        delta = msgspec.msgpack.decode((version / INDEX).read_bytes(), type=Delta)
        names = [INDEX, *(changes_name(number) for number in range(len(delta.sizes)))]
    yield from (version / name for name in (*names, MANIFEST))


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


class VersionRoot:
    """Place at which engines find the versions of a directory: its own path, or a URL."""

    def __init__(self, location: str) -> None:
        """Take its path or URL."""
        self.location = location

    def add(self, version: Path) -> None:
        """Let engines read a complete version. If they cannot, forgets it and raises WeightError."""

    def remove(self, names: Sequence[str]) -> None:
        """Forget versions that were removed from the directory."""

    def close(self) -> None:
        """Let engines read no more. Idempotent."""


class VersionDirectories:
    """The versions in one directory, `v00000012-EPOCH` each, in the order in which they were published."""

    def __init__(self, directory: Path, root: VersionRoot, keep: int, *, durable: bool) -> None:
        """Start without versions.

        Args:
            directory: holds the versions.
            root: where engines find them.
            keep: how many of the newest versions `retire` keeps, at least 1.
            durable: sync each version to the disk before it becomes visible.
        """
        self.directory = directory
        self._root = root
        self._keep = max(keep, 1)
        self._durable = durable
        self._published: list[tuple[int, Path]] = []
        self._needs: dict[Path, tuple[Path, ...]] = {}
        """Directory of a version -> others without which it cannot be read."""

    def adopt(self) -> None:
        """Take over the versions of an earlier process, oldest first, and remove unfinished ones."""
        found = []
        for path in self.directory.iterdir():
            if path.name.endswith(".tmp"):
                remove(path)
            elif match := VERSION_NAME.fullmatch(path.name):
                found.append((path.stat().st_mtime_ns, int(match[1]), path))
        self._published = [(version, path) for _, version, path in sorted(found)]
        for manifest in read_manifests(self.directory):
            self.require(manifest)

    def require(self, manifest: WeightManifest) -> None:
        """Keep the directories that a version's chain names for as long as the version."""
        path = self.directory / Path(manifest.location).name
        self._needs[path] = tuple(self.directory / link.directory for link in manifest.chain)

    @contextmanager
    def written(self, epoch: str, version: int) -> Iterator[tuple[Path, Path]]:
        """Write a version within the block; engines can read it when the block ends.

        A version of the same name is replaced. If the block raises, what it wrote is removed.

        Yields:
            (empty directory to write to, path that it will have).

        Raises:
            OSError: the directory cannot be made or renamed.
            WeightError: it cannot be copied to where engines read it.
        """
        final = self.directory / f"v{version:08d}-{epoch}"
        with directory_written_aside(final, durable=self._durable) as aside:
            yield aside, final
        self._published = [entry for entry in self._published if entry[1] != final]
        try:
            self._root.add(final)
        except WeightError:
            self._remove_here(final)
            raise
        self._published.append((version, final))

    def retire(self, in_use: frozenset[int]) -> None:
        """Remove versions that are neither in use nor among the newest, nor needed by one that is."""
        newest = self._published[-self._keep :]
        kept = {path for version, path in self._published if version in in_use or (version, path) in newest}
        kept |= {path for one in kept for path in self._needs.get(one, ())}
        self._remove([path for _, path in self._published if path not in kept])
        self._published = [entry for entry in self._published if entry[1] in kept]

    def clear(self) -> None:
        """Remove all versions."""
        self._remove([path for _, path in self._published])
        self._published = []

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._remove_here(path)
        if paths:
            self._root.remove([path.name for path in paths])

    def _remove_here(self, path: Path) -> None:
        remove(path)
        self._needs.pop(path, None)


def remove(path: Path) -> None:
    """Remove a directory if it exists; a reader that has mapped a file of it keeps the bytes."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
