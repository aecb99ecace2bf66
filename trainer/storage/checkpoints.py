"""Checkpoints: a directory for each version, complete only when its manifest is there.

    DIRECTORY/step_00000020/rank_00000.safetensors ...   what each rank's `Backend.save` wrote
    DIRECTORY/step_00000020/manifest.json                written last, aside and renamed

A directory without a manifest, or whose files have other sizes than it says, is torn: it is passed over, and
removed by the next save.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from protocol.errors import SettingsError, TetherError
from protocol.host.atomic_file import sync

MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{8,})")
READ_BYTES = 1 << 22


class FilePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    name: str
    nbytes: int
    xxh3: str
    """xxh3-64 of its bytes, 16 hex digits."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a trainer needs to go on from a checkpoint."""

    version: int
    """Committed batches that the weights have seen."""
    epoch: str
    sequence: int
    """The ledger's, when the checkpoint was made."""
    digest: int
    """Of the weight manifest that was published for this version."""
    spool_position: int = 0
    """Of the spool's journal."""
    layout: dict[str, int] = {}
    """Parallel sizes by name."""
    files: tuple[FilePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    directory: Path
    manifest: CheckpointManifest

    @property
    def version(self) -> int:
        return self.manifest.version

    def verify(self) -> None:
        """Read every file and compare it with its digest.

        Raises:
            SettingsError: names the file, and what to do.
        """
        for part in self.manifest.files:
            path = self.directory / part.name
            try:
                found = _hash(path)
            except OSError as error:
                raise SettingsError(f"checkpoint file {path} cannot be read: {error}") from error
            if found != part.xxh3:
                raise SettingsError(
                    f"checkpoint file {path} is damaged: remove {self.directory} to go on from the checkpoint before it"
                )


class Checkpoints:
    """The checkpoints of a run. Written by trainer rank 0; the directory is shared by all ranks."""

    def __init__(self, directory: Path, keep: int) -> None:
        """`keep` is how many complete checkpoints stay; at least the newest does."""
        self.directory = directory
        self._keep = max(keep, 1)

    @contextmanager
    def writing(
        self,
        version: int,
        *,
        epoch: str,
        digest: int,
        sequence: int,
        spool_position: int = 0,
        layout: Mapping[str, int] | None = None,
    ) -> Iterator[Path]:
        """Yield an empty directory for the ranks' parts; on leaving, make it a durable checkpoint and prune
        older ones.

        Every rank's part has to be there when the body ends. If the body raises, the directory is removed and
        the checkpoints from before are as they were.

        Raises:
            TetherError: the directory cannot be written; names it.
        """
        path = self._path(version)
        try:
            _remove(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise TetherError(f"checkpoint {path}: {error}") from error
        try:
            yield path
            files = tuple(_part(file) for file in sorted(path.iterdir()))
            manifest = CheckpointManifest(
                version=version,
                epoch=epoch,
                sequence=sequence,
                digest=digest,
                spool_position=spool_position,
                layout=dict(layout or {}),
                files=files,
            )
            _write_last(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        except OSError as error:
            _remove(path)
            raise TetherError(f"checkpoint {path}: {error}") from error
        except BaseException:
            _remove(path)
            raise
        self._prune(version)

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first. Compares sizes, not digests."""
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
        """The newest complete checkpoint, or None.

        Args:
            at_most: newest version to look at.
            digests: version -> digest of the weights that the run's branch has there. One with other
                weights is of an abandoned branch,
                and passed over if there is any other.

        Raises:
            SettingsError: with `verify`, if a file of it is damaged.
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
        """Of what is not newer, remove torn checkpoints and all but the last complete ones. Newer ones are
        not this trainer's to touch: it may have slept through its succession, and they are its
        successor's."""
        kept = {c.directory for c in [c for c in self.complete() if c.version <= newest][-self._keep :]}
        for path in self.directory.iterdir():
            found = NAME.fullmatch(path.name)
            if found and int(found[1]) <= newest and path not in kept:
                _remove(path)


def _open(path: Path) -> Checkpoint | None:
    """The checkpoint in a directory, or None if it is torn."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
        whole = all(
            Path(part.name).name == part.name and (path / part.name).stat().st_size == part.nbytes
            for part in manifest.files
        )
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return Checkpoint(path, manifest) if whole and path.name == f"step_{manifest.version:08d}" else None


def _part(path: Path) -> FilePart:
    """Bring a file to the disk and describe it."""
    sync(path)
    return FilePart(path.name, path.stat().st_size, _hash(path))


def _hash(path: Path) -> str:
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _write_last(directory: Path, manifest: bytes) -> None:
    aside = directory / (MANIFEST + ".tmp")
    aside.write_bytes(manifest)
    sync(aside)
    sync(directory)
    aside.rename(directory / MANIFEST)
    sync(directory)
    sync(directory.parent)


def _remove(path: Path) -> None:
    """Remove a directory if it is there; the manifest first, so that a crash half-way leaves a torn one."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
