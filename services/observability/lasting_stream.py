"""Writes to a stream whose reader may go away: text that cannot be written is left out."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe or a terminal that nobody will read any more; others, as of a full disk, may be over."""


class LastingStream:
    """Text stream whose `write` and `flush` never fail: a run continues without its output."""

    def __init__(self, stream: TextIO) -> None:
        """Store the stream, and have it escape the characters that its encoding lacks."""
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text as far as that is possible."""
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write buffered text as far as that is possible."""
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:  # buffered text would fail again as the process ends
                with open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), self._stream.fileno())
