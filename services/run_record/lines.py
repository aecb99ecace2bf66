"""Reads the lines of a file: all at once, or in bounded pieces as the file grows."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 4 << 20
"""Bytes that one read returns at most; a longer line is skipped."""


def read_parsed(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the complete lines that `parse` can read, oldest first; none if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.endswith(b"\n") and (parsed := parse(line)) is not None:
                yield parsed


class FollowedLine(NamedTuple):
    """One complete line of a file."""

    offset: int
    """Byte offset of the line's first byte in the file."""
    data: bytes
    """The line, newline included."""


class LineFollower:
    """Remembers how far a file was read; one that was replaced or truncated is read from the start again."""

    def __init__(
        self, path: Path, tail_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES, offset: int = 0
    ) -> None:
        """Store the arguments.

        Args:
            path: the file; it need not exist yet.
            tail_bytes: if not None, reading starts at the first line within so many bytes of the file's end.
            chunk_bytes: limit of one `read`.
            offset: where an earlier follower ended; a file that is shorter is read from its start.
        """
        self.path = path
        self.offset = offset
        """Where the next read starts."""
        self.starts = 0
        """How often reading started: 1 after the first read, one more after each replacement of the file."""
        self.is_complete = True
        """Whether reading started at the file's first byte."""
        self._tail_bytes = tail_bytes
        self._chunk_bytes = chunk_bytes
        self._file_id: tuple[int, int] | None = None
        self._in_line = False  # the bytes up to the next newline belong to a line that is skipped

    def read(self) -> tuple[list[FollowedLine], bool]:
        """Return the complete lines of the next chunk, and whether another read would find more at once.

        A file that cannot be read counts as empty.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._locate((status.st_dev, status.st_ino), status.st_size)
                file.seek(self.offset)
                chunk = file.read(self._chunk_bytes)
        except OSError:
            return [], False
        is_full = len(chunk) == self._chunk_bytes
        end = chunk.rfind(b"\n") + 1
        if is_full and not end:
            self._in_line = True
            end = len(chunk)
            lines = []
        else:
            lines = list(self._split(chunk[:end]))
        self.offset += end
        return lines, is_full

    def read_rest(self) -> list[FollowedLine]:
        """Return all complete lines that the file has gained; the file must be small."""
        followed: list[FollowedLine] = []
        more = True
        while more:
            lines, more = self.read()
            followed += lines
        return followed

    def _locate(self, file_id: tuple[int, int], size: int) -> None:
        if file_id == self._file_id and size >= self.offset:
            return
        resumes = self._file_id is None and 0 < self.offset <= size
        self._file_id = file_id
        self.starts += 1
        if resumes:
            self.is_complete = False
            return
        self.offset = 0 if self._tail_bytes is None else max(0, size - self._tail_bytes)
        self.is_complete = self.offset == 0
        self._in_line = self.offset > 0

    def _split(self, data: bytes) -> Iterator[FollowedLine]:
        start = 0
        while (end := data.find(b"\n", start) + 1) > 0:
            if not self._in_line:
                yield FollowedLine(self.offset + start, data[start:end])
            self._in_line = False
            start = end
