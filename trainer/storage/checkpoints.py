"""Writes and finds checkpoints. A checkpoint is a directory per version, complete only with its manifest.

    DIRECTORY/step_00000020/rank_00000.safetensors ...   result of each rank's `Backend.copy_state`
    DIRECTORY/step_00000020/manifest.json                written last, atomically

A directory without a manifest, or with files of other sizes than in the manifest, is torn: readers skip it,
and the next save removes it.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from protocol.errors import SettingsError, TetherError
from protocol.host.atomic_file import sync, write_atomically
from trainer.storage.checksums import FilePart, damaged_files, digest_of, sealed

MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{8,})")


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a trainer needs to resume from a checkpoint."""

    version: int
    """Version of the weights."""
    epoch: str
    """Epoch of the trainer that wrote the checkpoint."""
    sequence: int
    """Sequence number of the ledger at the checkpoint."""
    digest: int
    """Digest of the weight manifest published for this version."""
    spool_position: int = 0
    """Position of the spool's journal at the checkpoint."""
    layout: dict[str, int] = {}
    """Parallel sizes by name."""
    files: tuple[FilePart, ...] = ()
    """All files except the manifest, by name."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    directory: Path
    manifest: CheckpointManifest

    @property
    def version(self) -> int:
        return self.manifest.version

    def verify(self) -> None:
        """Compare every file, including the manifest, with its checksum.

        Raises:
            SettingsError: a file is damaged; the message names the file and the remedy.
        """
        for path, problem in damaged_files(self.directory / MANIFEST):
            raise SettingsError(
                f"checkpoint file {path} {problem}; remove {self.directory} to continue from the checkpoint "
                "before it"
            )


class Checkpoints:
    """Checkpoints of a run. Only trainer rank 0 writes; all ranks share the directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Open a directory, which need not exist; keep the newest `keep` complete checkpoints, at least 1."""
        self.directory = directory
        self._keep = max(keep, 1)
        self.held: set[int] = set()
        """Versions that are in use by readers and must not be pruned."""

    def begin(self, version: int) -> Path:
        """Return an empty directory for the ranks' shards; `finish` makes it a checkpoint.

        Raises:
            TetherError: the directory cannot be written; the message names the directory.
        """
        path = self._path(version)
        try:
            _remove(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise TetherError(f"checkpoint {path}: {error}") from error
        return path

    def finish(
        self,
        version: int,
        *,
        epoch: str,
        digest: int,
        sequence: int,
        spool_position: int = 0,
        layout: Mapping[str, int] | None = None,
    ) -> None:
        """Make a directory with every rank's shard a durable checkpoint, and prune older checkpoints.

        The arguments are fields of `CheckpointManifest`.

        Raises:
            TetherError: the checkpoint cannot be written; the message names the directory.
        """
        path = self._path(version)
        try:
            files = tuple(_part(path, file) for file in sorted(path.rglob("*")) if file.is_file())
            manifest = CheckpointManifest(
                version=version,
                epoch=epoch,
                sequence=sequence,
                digest=digest,
                spool_position=spool_position,
                layout=dict(layout or {}),
                files=files,
            )
            _write_last(path, sealed(msgspec.json.format(msgspec.json.encode(manifest), indent=2)))
        except OSError as error:
            raise TetherError(f"checkpoint {path}: {error}") from error
        self._prune(version)

    def abandon(self, version: int) -> None:
        """Remove an unfinished checkpoint."""
        _remove(self._path(version))

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, oldest first. Compares file sizes, not digests."""
        found = (
            []
            if not self.directory.is_dir()
            else [path for path in self.directory.iterdir() if NAME.fullmatch(path.name)]
        )
        checkpoints = [checkpoint for path in found if (checkpoint := _open(path)) is not None]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.version)

    def latest(
        self, *, verify: bool = True, at_most: int | None = None, digests: Mapping[int, int] | None = None
    ) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        Args:
            verify: whether to compare its files with their digests.
            at_most: newest version to consider.
            digests: version -> digest of the weights on the run's branch. A checkpoint with a different
                digest belongs to an abandoned branch, and is skipped if another checkpoint exists.

        Raises:
            SettingsError: with `verify`, a file of the checkpoint is damaged.
        """
        checkpoints = [found for found in self.complete() if at_most is None or found.version <= at_most]
        known = digests or {}
        checkpoints = [
            c for c in checkpoints if known.get(c.version, c.manifest.digest) == c.manifest.digest
        ] or checkpoints
        if not checkpoints:
            return None
        if verify:
            checkpoints[-1].verify()
        return checkpoints[-1]

    def _path(self, version: int) -> Path:
        return self.directory / f"step_{version:08d}"

    def _prune(self, newest: int) -> None:
        """Remove torn and old complete checkpoints up to version `newest`.

        Newer checkpoints may belong to a successor, if this trainer was suspended and fenced.
        """
        kept = {c.directory for c in [c for c in self.complete() if c.version <= newest][-self._keep :]}
        for path in self.directory.iterdir():
            found = NAME.fullmatch(path.name)
            if found and int(found[1]) <= newest and path not in kept and int(found[1]) not in self.held:
                _remove(path)


def _open(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory, or None if it is torn."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
        whole = all(
            _is_inside(part.name) and (path / part.name).stat().st_size == part.nbytes
            for part in manifest.files
        )
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return Checkpoint(path, manifest) if whole and path.name == f"step_{manifest.version:08d}" else None


def _is_inside(name: str) -> bool:
    """Return whether a relative path is a file in the checkpoint's directory or in a subdirectory."""
    path = PurePosixPath(name)
    return len(path.parts) in (1, 2) and not path.is_absolute() and ".." not in path.parts


def _part(directory: Path, path: Path) -> FilePart:
    """Sync a file of a checkpoint to disk and describe it."""
    sync(path)
    return FilePart(path.relative_to(directory).as_posix(), path.stat().st_size, digest_of(path))


def _write_last(directory: Path, manifest: bytes) -> None:
    """Sync the directory, then write the manifest, which completes the checkpoint."""
    sync(directory)
    write_atomically(directory / MANIFEST, manifest)
    sync(directory.parent)


def _remove(path: Path) -> None:
    """Remove a directory if it exists, its manifest first, so a crash leaves a torn checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
