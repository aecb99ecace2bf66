"""Links the lines of an archived event log: each ends with a digest of itself and of the link before it.

The newest link also stands in a file beside the log. So a line that was edited, moved, doubled or removed is
detected, whatever field it is in, and so is a missing end.

Links are no signatures: who rewrites the whole log and the file beside it is detected only by what the events
say.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from protocol.host.atomic_file import write_atomically

HEAD = "audit.head"
"""Name of the file beside the log: the newest event's number and link, as JSON."""
_FIRST = b"0" * 16
_LINK = re.compile(rb',"chain":"([0-9a-f]{16})"}\n\Z')
_LENGTH = 29  # bytes that the pattern matches


class Chain:
    """Checks the links of a log, line by line in order."""

    def __init__(self, path: Path) -> None:
        """Read the file beside the log. Do so before reading the log, which may grow meanwhile."""
        self._previous = _FIRST
        self._sequence, self._newest = _head(path)

    def follows(self, line: bytes) -> bool:
        """Return whether `line`, with its newline, is as it was archived and follows the one before it."""
        match = _LINK.search(line[-_LENGTH:])
        if match is None:
            return False
        intact = match[1] == _link(self._previous, line[:-_LENGTH] + b"}")
        self._previous = match[1]
        if match[1] == self._newest:
            self._newest = b""
        return intact

    def missing(self) -> str | None:
        """Return what is wrong with the end of the log, None if nothing is."""
        return f"event {self._sequence} was archived, but the log does not hold it" if self._newest else None


def append(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events at the end of the log, durably.

    Raises:
        OSError: if that fails; complete lines may have been written all the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    event: Mapping[str, Any] = {}
    with open(path, "a+b") as file:
        link = _last(file)
        lines = []
        for event in events:
            body = json.dumps(event, separators=(",", ":")).encode()
            link = _link(link, body)
            lines.append(body[:-1] + b',"chain":"' + link + b'"}\n')
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
    head = {"seq": event.get("seq", 0), "chain": link.decode()}
    write_atomically(path.with_name(HEAD), json.dumps(head).encode())


def _link(previous: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(previous + body, digest_size=8).hexdigest().encode()


def _last(file: IO[bytes]) -> bytes:
    """Return the link at the end of a log."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LENGTH))
    match = _LINK.search(file.read())
    return match[1] if match else _FIRST


def _head(path: Path) -> tuple[int, bytes]:
    """Return number and link in the file beside the log; an empty link if there is no such file.

    A file in another format gives a link that matches none.
    """
    try:
        content = path.with_name(HEAD).read_bytes()
    except FileNotFoundError:
        return 0, b""
    try:
        head = json.loads(content)
        return int(head["seq"]), str(head["chain"]).encode()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0, b"unreadable"
