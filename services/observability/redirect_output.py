"""Where what libraries print goes while a command works: to a file, and not among what the user asked for."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import SettingsError


@contextlib.contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Inside, what this process and those that it starts write to stdout and stderr is appended to a file.

    By file descriptor: engines print from threads, from C and from processes of their own, some of which
    outlive the block.

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
    kept = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, own in zip((1, 2), kept, strict=True):
            os.dup2(own, stream)
            os.close(own)
        os.close(file)
