"""Detects damaged files by checksums in the file itself or in a list of files.

The last member of a sealed JSON document is the checksum of all preceding bytes. A sealed document lists the
other files of its directory: checksums.json in an exported model, manifest.json in a checkpoint.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import xxhash

from protocol.errors import SettingsError, error_text

FILE = "checksums.json"
"""List of files in an exported model's directory; Hugging Face's tools ignore it."""
MEMBER = "checksum"
"""Last member of a sealed document."""
_END = re.compile(rb',\n  "checksum": "([0-9a-f]{16})"\n}\n\Z')
_LENGTH = 37  # bytes that the pattern matches
_READ_BYTES = 1 << 22


class FilePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a directory."""

    name: str
    """Relative to the directory."""
    nbytes: int
    """Size, bytes."""
    xxh3: str
    """xxh3-64 of its bytes, 16 hex digits."""


class FileList(msgspec.Struct, frozen=True):
    """Files of a directory; a document may have further members."""

    files: tuple[FilePart, ...]
    """By name."""


def digest_of(path: Path) -> str:
    """Return xxh3-64 of a file's bytes, 16 hex digits. Raises OSError."""
    with path.open("rb") as file:
        return digest_of_rest(file)


def digest_of_rest(file: IO[bytes]) -> str:
    """Return xxh3-64 of the remaining bytes of an open file, 16 hex digits. Raises OSError."""
    state = xxhash.xxh3_64()
    while chunk := file.read(_READ_BYTES):
        state.update(chunk)
    return state.hexdigest()


def sealed(document: bytes) -> bytes:
    """Return a non-empty JSON object with its checksum as the last member."""
    body = document.rstrip()[:-1].rstrip()
    return body + f',\n  "{MEMBER}": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def is_sealed(document: bytes) -> bool:
    """Return whether a document is intact since `sealed` returned it."""
    match = _END.match(document[-_LENGTH:])
    return match is not None and match[1].decode() == xxhash.xxh3_64_hexdigest(document[:-_LENGTH])


def write_checksums(directory: Path) -> None:
    """List all files of a directory in its checksums.json. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    parts = tuple(
        FilePart(path.relative_to(directory).as_posix(), path.stat().st_size, digest_of(path))
        for path in paths
    )
    listed = msgspec.json.format(msgspec.json.encode(FileList(parts)), indent=2)
    (directory / FILE).write_bytes(sealed(listed))


def listed_files(path: Path) -> tuple[FilePart, ...]:
    """Return the files in a list; empty if the list cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FileList).files
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()


def damaged_document(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and damage of a sealed document if it is damaged."""
    try:
        if not is_sealed(path.read_bytes()):
            yield path, "is damaged: it does not match its checksum"
    except OSError as error:
        yield path, f"cannot be read: {error_text(error)}"


def damaged_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Verify a list and all files in it; yield path and damage of each damaged file."""
    if damage := list(damaged_document(path)):
        yield from damage
        return
    for part in listed_files(path):
        file = path.parent / part.name
        try:
            if digest_of(file) != part.xxh3:
                yield file, f"is damaged: it does not match its checksum in {path.name}"
        except OSError as error:
            yield file, f"cannot be read: {error_text(error)}"


def check_model_files(directory: Path) -> None:
    """Compare all files of a model's directory with their checksums, if it has any.

    Raises:
        SettingsError: a file is damaged; the message names the file.
    """
    if (directory / FILE).is_file():
        for path, problem in damaged_files(directory / FILE):
            raise SettingsError(
                f"model file {path} {problem}; restore the directory, or remove {directory / FILE} if you "
                "changed the model yourself"
            )
