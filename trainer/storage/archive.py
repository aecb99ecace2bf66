"""Archives the records of steps that a durable checkpoint covers, so every step can be rebuilt.

    DIRECTORY/step_00000012.msgpack    one file per step, written atomically and never changed

The spool deletes records covered by a checkpoint only after they are archived. When space runs out, the
oldest steps are removed.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.errors import SpoolError, error_text
from protocol.host.atomic_file import write_atomically
from trainer.storage.stored import MissingRecords, StoredMessage

NAME = re.compile(r"step_(\d{8,})\.msgpack")


class ArchivedStep(msgspec.Struct, frozen=True):
    """Content of an archive file."""

    step: int
    records: tuple[StoredMessage, ...]
    calls: tuple[StoredMessage, ...] = ()
    """Calls of the groups, ordered by group, sample and number."""


class Archive:
    """Archive of a run. Only trainer rank 0 writes; other processes may read concurrently."""

    def __init__(self, directory: Path, limit_mb: int = 0) -> None:
        """Open a directory, which need not exist.

        Args:
            limit_mb: size limit of all steps, MiB; 0: archive no steps. Readers may omit the limit.
        """
        self.directory = directory
        self._limit = limit_mb << 20

    def put(self, step: int, records: Sequence[StoredMessage], calls: Sequence[StoredMessage] = ()) -> None:
        """Archive records and calls of a step with their checksums, durably; existing ones are replaced.

        Raises:
            SpoolError: the file cannot be written; an existing file stays.
        """
        if not self._limit:
            return
        path = self._path(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.msgpack.encode(ArchivedStep(step, tuple(records), tuple(calls))))
        except OSError as error:
            raise SpoolError(f"archive {path}: {error_text(error)}") from error

    def make_room(self) -> None:
        """Remove the oldest steps until the archive fits its limit; the newest step always stays.

        Raises:
            SpoolError: a file cannot be removed.
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
            raise SpoolError(f"archive {self.directory}: {error_text(error)}") from error

    def get(self, step: int, keys: Sequence[tuple[int, str]]) -> list[bytes]:
        """Return payloads of a step's groups in the order of `keys` (group, token).

        Raises:
            MissingRecords: (a LookupError) the archive lacks the step or some of the groups.
            SpoolError: the file cannot be read or is damaged; the message names the file.
        """
        records = self.records(step)
        by_key = {(record.group, record.token): record for record in records}
        absent = [key for key in keys if key not in by_key]
        if absent:
            no_record = "group {}: the archive has no record of it under lease {}"
            raise MissingRecords({key: no_record.format(*key) for key in absent})
        return [by_key[key].payload for key in keys]

    def records(self, step: int) -> tuple[StoredMessage, ...]:
        """Return all records of a step, in take order; empty if the step is not archived.

        Raises:
            SpoolError: the file cannot be read or is damaged; the message names the file.
        """
        return self.read(step).records

    def read(self, step: int) -> ArchivedStep:
        """Return a step with its records and calls; empty if the step is not archived.

        Raises:
            SpoolError: the file cannot be read or is damaged; the message names the file.
        """
        path = self._path(step)
        try:
            content = path.read_bytes()
            archived = msgspec.msgpack.decode(content, type=ArchivedStep)
        except FileNotFoundError:
            return ArchivedStep(step, ())
        except OSError as error:
            raise SpoolError(f"archive {path}: {error_text(error)}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SpoolError(f"archive {path} is damaged: {error}") from error
        if archived.step != step or msgspec.msgpack.encode(archived) != content:
            raise SpoolError(f"archive {path} is damaged: it is not what was written for step {step}")
        for item in (*archived.records, *archived.calls):
            if not item.is_whole:
                what = f"call {item.number} of sample {item.sample}" if item.number >= 0 else "the record"
                raise SpoolError(
                    f"archive {path} is damaged: {what} of group {item.group} does not match its checksum"
                )
        return archived

    def steps(self) -> list[int]:
        """Return the archived steps in order."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(match[1]) for path in self.directory.iterdir() if (match := NAME.fullmatch(path.name))
        )

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.msgpack"
