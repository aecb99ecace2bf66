"""Writes to a text stream and discards text that cannot be written, such as to a closed pipe."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Any, TextIO

_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a closed pipe or terminal. Other errors, such as a full disk, may be temporary."""


class BestEffortStream:
    """Text stream whose `write` and `flush` never raise OSError, so a run continues without its output."""

    def __init__(self, stream: TextIO) -> None:
        """Wrap the stream, and escape characters that its encoding does not support."""
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text; discard it on an error."""
        with self._ignoring_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush buffered text; ignore an error."""
        with self._ignoring_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _CLOSED:  # the interpreter flushes again at exit
                with open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), self._stream.fileno())
