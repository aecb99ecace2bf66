"""Names, writes and retires the directories of published versions, for file-based transports."""

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
"""File of a version's manifest, in its directory."""


def versions_in(config: WeightConfig, run_dir: Path) -> Path:
    """Return the directory of a run's versions for disk and http, as a path on this host."""
    return Path(config.directory) if config.directory else run_dir / "weights"


def bucket_path(directory: Path, index: int) -> Path:
    """Return the path of a bucket of a version."""
    return directory / bucket_name(index)


def write_manifest(manifest: WeightManifest, directory: Path) -> None:
    """Write the manifest of a version into its directory. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(data)


def files_of(version: Path) -> Iterator[Path]:
    """Yield the files that a version's manifest and index name. Raises OSError.

    A directory listing may lack files of other hosts.
    """
    manifest = msgspec.json.decode((version / MANIFEST).read_bytes(), type=WeightManifest)
    names = [bucket_name(index) for index in range(len(manifest.buckets))]
    if manifest.chain and (manifest.chain[-1].apart or len(manifest.chain) > 1):
        delta = msgspec.msgpack.decode((version / INDEX).read_bytes(), type=Delta)
        names = [INDEX, *(changes_name(number) for number in range(len(delta.sizes)))]
    yield from (version / name for name in (*names, MANIFEST))


def read_manifests(directory: Path) -> list[WeightManifest]:
    """Return the manifests of the versions in a directory, in order of writing."""
    found = []
    for path in directory.glob("v*"):
        if not VERSION_NAME.fullmatch(path.name):
            continue
        try:
            data = (path / MANIFEST).read_bytes()
            time_ns = path.stat().st_mtime_ns
            manifest = msgspec.json.decode(data, type=WeightManifest)
        except (OSError, msgspec.MsgspecError):  # the version is being removed
            continue
        manifest = msgspec.structs.replace(manifest, location=str(path))
        found.append((time_ns, manifest.version, manifest))
    return [manifest for _, _, manifest in sorted(found, key=lambda item: item[:2])]


class VersionRoot:
    """Location where engines read the versions of a directory: its path, or a URL."""

    def __init__(self, location: str) -> None:
        """Create a root at a path or URL."""
        self.location = location

    def add(self, version: Path) -> None:
        """Make a complete version readable for engines; on failure, forget it and raise WeightError."""

    def remove(self, names: Sequence[str]) -> None:
        """Forget versions that were removed from the directory."""

    def close(self) -> None:
        """Stop access by engines. Idempotent."""


class VersionDirectories:
    """Versions in one directory, each named `v00000012-EPOCH`, in order of publication."""

    def __init__(self, directory: Path, root: VersionRoot, keep: int, *, durable: bool) -> None:
        """Start without versions.

        Args:
            root: location where engines read the versions.
            keep: number of newest versions that `retire` keeps, at least 1.
            durable: whether to sync each version to disk before it becomes visible.
        """
        self.directory = directory
        self._root = root
        self._keep = max(keep, 1)
        self._durable = durable
        self._published: list[tuple[int, Path]] = []
        self._needs: dict[Path, tuple[Path, ...]] = {}
        """Directory of a version -> directories that reading the version requires."""

    def adopt(self) -> None:
        """Adopt the versions of an earlier process, oldest first, and remove unfinished versions."""
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
        """Keep the directories in a version's chain as long as the version."""
        path = self.directory / Path(manifest.location).name
        self._needs[path] = tuple(self.directory / link.directory for link in manifest.chain)

    @contextmanager
    def written(self, epoch: str, version: int) -> Iterator[tuple[Path, Path]]:
        """Write a version within the block; engines can read the version after the block.

        A version of the same name is replaced. If the block raises, its files are removed.

        Yields:
            (empty directory to write to, final path).

        Raises:
            OSError: the directory cannot be created or renamed.
            WeightError: the version cannot be copied to `root`.
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
        """Remove versions that are not in use, not among the newest, and not needed by such a version."""
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
    """Remove a directory if it exists; a reader that has mapped one of its files keeps the bytes."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
