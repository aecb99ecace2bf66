"""Redirects the output of libraries to a file, so that the output of a command stays readable."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import SettingsError


@contextlib.contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Append the output to stdout and stderr within the block to a file.

    That includes the processes that the block starts. File descriptors are redirected, because engines print
    from threads, from C and from processes of their own, which may outlive the block.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, saved in zip((1, 2), copies, strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        os.close(file)
