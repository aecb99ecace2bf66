"""Writes files and directories aside and renames them: neither readers nor a crash see half of one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[Path]:
    """Yield a path beside `path` to write a file to; it replaces `path` when the block ends.

    Args:
        path: the file to be; an older one is replaced in one step.
        mode: permission bits of the new file, set before anything is written to it.
        durable: also bring bytes and directory entry to the disk, so that no crash loses them.

    Raises:
        OSError: the file cannot be written; `path` is as it was. A block that raises leaves it so, too.
    """
    aside = path.with_name(f"{path.name}.tmp")
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


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the contents of a file in one step. Arguments and errors are those of `written_aside`."""
    with written_aside(path, mode=mode, durable=durable) as aside:
        aside.write_bytes(data)


@contextmanager
def directory_written_aside(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` to write into; rename it to `path` when the block ends.

    A directory that is there already is removed first: between the two steps there is none, so readers of a
    path that is written twice have to look for a file in it that is written last.

    Raises:
        OSError: it cannot be written; `path` is as it was. A block that raises leaves it so, too.
    """
    aside = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for part in sorted(aside.rglob("*"), reverse=True):
            sync(part)
        sync(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Bring a file's bytes, or a directory's entries, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
