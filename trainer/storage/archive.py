"""The archive: the records of steps that a durable checkpoint covers, so that any of them can be built again.

    DIRECTORY/step_00000012.msgpack    one file a step, written aside, brought to the disk and renamed; never changed afterwards

The spool forgets what a checkpoint covers only once it is here. The oldest steps go first when there is no
room for all.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from protocol.errors import SpoolError
from protocol.host.atomic_file import sync
from trainer.storage.spool import MissingRecord

NAME = re.compile(r"step_(\d{8,})\.msgpack")


class ArchivedRecord(msgspec.Struct, frozen=True):
    """One group of a step."""

    group: int
    token: str
    checksum: int
    """xxh3-64 of group, token and payload."""
    payload: bytes
    """The encoded `ScoredRollout`, as the spool held it."""


class ArchivedStep(msgspec.Struct, frozen=True):
    """What a file holds."""

    step: int
    records: tuple[ArchivedRecord, ...]


class Archive:
    """The archive of a run. Written by trainer rank 0, read by anybody, also while it is written."""

    def __init__(self, directory: Path, limit_mb: int = 0) -> None:
        """`limit_mb`: room for all steps; with 0 nothing is kept. Readers need not say."""
        self.directory = directory
        self._limit = limit_mb << 20

    def put(self, step: int, records: Sequence[tuple[int, str, bytes]]) -> None:
        """Keep the records (group, token, payload) of a step. They are on disk when this returns; a file that
        was there is replaced.

        Raises:
            SpoolError: if they cannot be written; what was there before is as it was.
        """
        if not self._limit:
            return
        kept = tuple(
            ArchivedRecord(group, token, _checksum(group, token, payload), payload)
            for group, token, payload in records
        )
        path = self._path(step)
        aside = path.with_suffix(".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.msgpack.encode(ArchivedStep(step, kept)))
            sync(aside)
            aside.rename(path)
            sync(self.directory)
        except OSError as error:
            with suppress(OSError):
                aside.unlink()
            raise SpoolError(f"archive {path}: {error.strerror or error}") from error

    def make_room(self) -> None:
        """Remove the oldest steps until the others fit; the newest stays whatever its size.

        Raises:
            SpoolError: if a file cannot be removed.
        """
        try:
            sizes = {step: self._path(step).stat().st_size for step in self.steps()}
            total = sum(sizes.values())
            for step in list(sizes)[:-1]:
                if total <= self._limit:
                    return
                self._path(step).unlink()
                total -= sizes[step]
        except OSError as error:
            raise SpoolError(f"archive {self.directory}: {error.strerror or error}") from error

    def get(self, step: int, keys: Sequence[tuple[int, str]]) -> list[bytes]:
        """Payloads of a step's groups in the order of `keys` (group, token).

        Raises:
            MissingRecord: (a LookupError) the archive does not hold the step, or not this group of it.
            SpoolError: the file cannot be read or is damaged; names it.
        """
        path = self._path(step)
        try:
            archived = msgspec.msgpack.decode(path.read_bytes(), type=ArchivedStep)
        except FileNotFoundError:
            raise MissingRecord(*keys[0]) from None
        except OSError as error:
            raise SpoolError(f"archive {path}: {error.strerror or error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SpoolError(f"archive {path} is damaged: {error}") from error
        for record in archived.records:
            if _checksum(record.group, record.token, record.payload) != record.checksum:
                raise SpoolError(
                    f"archive {path} is damaged: the record of group {record.group} does not match its checksum"
                )
        found = {(record.group, record.token): record for record in archived.records}
        for key in keys:
            if key not in found:
                raise MissingRecord(*key)
        return [found[key].payload for key in keys]

    def steps(self) -> list[int]:
        """Steps that the archive holds, in order."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(match[1]) for path in self.directory.iterdir() if (match := NAME.fullmatch(path.name))
        )

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.msgpack"


def _checksum(group: int, token: str, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"%d %b " % (group, token.encode()) + payload)
