"""Writes files and directories under a temporary name and renames them, so readers see no partial ones."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import SettingsError


def check_absent(path: Path) -> None:
    """Refuse to write a new file over an existing one, which may be the user's own. Raises SettingsError."""
    if path.exists():
        raise SettingsError(f"{path} exists; give another file, or delete it")


@contextmanager
def written_aside(
    path: Path, *, mode: int = 0o644, durable: bool = True, aside: Path | None = None
) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file written there replaces `path` when the block ends.

    Args:
        path: the file to write; an existing file is replaced atomically.
        mode: permission bits of the new file, set before the first write.
        durable: also sync the bytes and the directory entry to disk, so they survive a crash.
        aside: temporary path on the same file system; default: `path` with the suffix ".tmp".

    Raises:
        OSError: the file cannot be written. `path` stays unchanged, also if the block raises.
    """
    aside = aside or path.with_name(f"{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)
        os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield aside
        if durable:
            sync(aside)
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_atomically(
    path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True, aside: Path | None = None
) -> None:
    """Replace the contents of a file atomically; arguments and errors as in `written_aside`."""
    with written_aside(path, mode=mode, durable=durable, aside=aside) as temporary:
        temporary.write_bytes(data)


@contextmanager
def directory_written_aside(path: Path, *, durable: bool = True, aside: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary directory next to `path`, which becomes `path` when the block ends.

    An existing directory is removed just before the rename, so `path` is briefly missing.

    Args:
        durable: also sync the contents and the directory entry to disk, so they survive a crash.
        aside: temporary directory on the same file system; default: `path` with the suffix ".tmp".

    Raises:
        OSError: the directory cannot be written or renamed. If the block raises, `path` stays unchanged.
    """
    aside = aside or path.with_name(f"{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for part in [*sorted(aside.rglob("*"), reverse=True), aside] if durable else ():
            sync(part)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        if durable:
            sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Sync a file's bytes, or a directory's entries, to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
