"""Writes files and directories aside and renames them: no half-written one is seen, even after a crash."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(
    path: Path, *, mode: int = 0o644, durable: bool = True, aside: Path | None = None
) -> Iterator[Path]:
    """Yield a temporary path next to `path` to write a file to; it replaces `path` when the block ends.

    Args:
        path: the file to write; an existing one is replaced in one step.
        mode: permission bits of the new file, set before anything is written to it.
        durable: also sync the bytes and the directory entry to the disk, so that no crash loses them.
        aside: the temporary path, on the same file system; by default `path` with the suffix ".tmp" added.

    Raises:
        OSError: the file cannot be written; `path` is unchanged, as it is if the block raises.
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
    """Replace the contents of a file in one step; arguments and errors are as in `written_aside`."""
    with written_aside(path, mode=mode, durable=durable, aside=aside) as temporary:
        temporary.write_bytes(data)


@contextmanager
def directory_written_aside(path: Path, *, durable: bool = True, aside: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary directory next to `path` to write into; it becomes `path` when the block ends.

    An existing directory is removed just before the rename, so for a moment there is none.

    Args:
        path: the directory to write.
        durable: also sync everything in it and the directory entry to the disk, so that no crash loses them.
        aside: the temporary directory, on the same file system; by default `path` with ".tmp" added.

    Raises:
        OSError: the directory cannot be written or renamed. If the block raises, `path` is unchanged.
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
    """Sync a file's bytes, or a directory's entries, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
