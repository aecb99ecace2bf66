"""Reads the lines of a file: all at once, or in bounded pieces as the file grows."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 4 << 20
"""Maximum number of bytes per read; longer lines are skipped."""


def read_parsed(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the complete lines that `parse` accepts, oldest first; none without a file."""
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
    """Reader that resumes at its last offset; a replaced or truncated file is read from the start."""

    def __init__(
        self, path: Path, tail_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES, offset: int = 0
    ) -> None:
        """Store the arguments.

        Args:
            path: file, which may not exist yet.
            tail_bytes: start at the first line within this many bytes before the file's end; None starts at
                0.
            chunk_bytes: maximum number of bytes per `read`.
            offset: end of an earlier follower; ignored if the file is shorter.
        """
        self.path = path
        self.offset = offset
        """Start of the next read, bytes."""
        self.starts = 0
        """Number of starts: 1 after the first read, one more after each replacement of the file."""
        self.is_complete = True
        """Whether reading started at the file's first byte."""
        self._tail_bytes = tail_bytes
        self._chunk_bytes = chunk_bytes
        self._file_id: tuple[int, int] | None = None
        self._in_line = False  # inside a line that is skipped, up to the next newline

    def read(self) -> tuple[list[FollowedLine], bool]:
        """Return the complete lines of the next chunk, and whether more can be read at once.

        An unreadable file counts as empty.
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
        """Return all new complete lines; the file must be small."""
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
