"""Links the lines of a JSON log: each line ends with a digest of its content and the previous link.

A separate file, the log's head, stores the newest link. The chain reveals a line that was edited, moved,
duplicated or removed, and a truncated log.

Links are not signatures: a rewrite of the whole log with its head is revealed only by the lines' contents.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from protocol.errors import error_text
from protocol.host.atomic_file import write_atomically
from protocol.host.file_lock import locked

LINK = "chain"
"""Name of the last member of each line."""
LOCK_TIMEOUT_S = 5.0
"""Seconds to wait while another process appends to the log."""
_FIRST = b"0" * 16
_LINK = re.compile(rb',"chain":"([0-9a-f]{16})"}\n\Z')
_LENGTH = 29  # bytes matched by the pattern
_TAIL = 1 << 16


def head_path(log: Path) -> Path:
    """Return the path of a log's head: audit.head for audit.jsonl."""
    return log.with_suffix(".head")


class _Head(msgspec.Struct):
    """Content of a head file."""

    chain: str
    """Link of the newest line."""


class Chain:
    """Verifier of a log's links, line by line in order."""

    def __init__(self, path: Path) -> None:
        """Read the log's head. Must precede reading the log, which may grow."""
        self._previous = _FIRST
        self._head = head_path(path).name
        self._newest = _newest(path)

    def follows(self, line: bytes) -> bool:
        """Return whether `line`, including its newline, is unchanged and follows the previous line."""
        match = _LINK.search(line[-_LENGTH:])
        if match is None:
            return False
        intact = match[1] == _link(self._previous, line[:-_LENGTH] + b"}")
        self._previous = match[1]
        if match[1] == self._newest:
            self._newest = b""
        return intact

    def missing(self) -> str | None:
        """Return the error at the end of the log; None if the log is complete."""
        return f"the newest line that {self._head} names is missing" if self._newest else None


def damaged_lines(path: Path, remedy: str = "") -> Iterator[tuple[Path, str]]:
    """Read a log; yield path and problem for each damaged line and for a missing end.

    A torn last line is not reported unless the end is missing: a crash leaves it and the next append replaces
    it.

    Args:
        path: path of the log.
        remedy: text added to the message if the end is missing.
    """
    head = head_path(path)
    if not head.is_file():
        yield head, f"is missing: whether {path.name} has its end is not known"
    chain, cut = Chain(path), ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    cut = f"line {number}, its last one, is cut: "
                elif not chain.follows(line):
                    yield path, f"line {number} is not what was written, or does not follow the line before"
    except OSError as error:
        yield path, f"cannot be read: {error_text(error)}"
        return
    if missing := chain.missing():
        yield path, f"{cut}{missing}{remedy}"


def append(path: Path, bodies: Iterable[bytes], *, durable: bool = True) -> None:
    """Append lines to a log. Readers see all lines or none; a torn last line is replaced.

    Args:
        path: path of the log, created if missing.
        bodies: non-empty JSON objects.
        durable: whether to sync log and head to disk.

    Raises:
        OSError: the log cannot be written, for example on a full disk. No line was written, so the call may
            be repeated.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, timeout_s=LOCK_TIMEOUT_S, create=True) as handle:
        end, last = last_line(handle)
        match = _LINK.search(last)
        link = match[1] if match else _FIRST
        if end < os.fstat(handle).st_size:
            os.ftruncate(handle, end)
        lines = []
        for body in bodies:
            link = _link(link, body)
            lines.append(body[:-1] + b',"chain":"' + link + b'"}\n')
        try:
            _write(handle, b"".join(lines), end)
            if durable:
                os.fsync(handle)
            write_atomically(head_path(path), msgspec.json.encode(_Head(link.decode())), durable=durable)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, end)
            error.filename = error.filename or str(path)  # a write to a descriptor names no file
            raise


def _write(handle: int, data: bytes, offset: int) -> None:
    while data:  # on a full disk pwrite first writes a part, then fails
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def last_line(handle: int) -> tuple[int, bytes]:
    """Return the end offset of the last complete line, and the line; 0 and empty without one."""
    size = start = os.fstat(handle).st_size
    tail = b""
    while start > 0 and tail.count(b"\n") < 2:
        start = max(0, start - _TAIL)
        tail = os.pread(handle, size - start, start)
    lines = tail[: tail.rfind(b"\n") + 1]
    return start + len(lines), lines[lines[:-1].rfind(b"\n") + 1 :]


def _link(previous: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(previous + body, digest_size=8).hexdigest().encode()


def _newest(path: Path) -> bytes:
    """Return the link in a log's head; empty without a head, an unmatchable link if it is damaged."""
    try:
        content = head_path(path).read_bytes()
    except FileNotFoundError:
        return b""
    try:
        return msgspec.json.decode(content, type=_Head).chain.encode()
    except (ValueError, RecursionError):  # a MsgspecError is a ValueError
        return b"unreadable"
