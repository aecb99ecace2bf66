"""Converts errors that end a process to one line and an exit code, and configures logging.

Exit codes: 0 drained, `EXIT_FAILED` 1, `EXIT_SETTINGS` 2, and for services `EXIT_UNAVAILABLE` 3.
"""

import logging
import os
import sys
from typing import Any, NoReturn

from protocol.errors import SettingsError, SpoolError, TetherError, Unavailable, innermost
from services.observability.printable import one_line
from services.settings.sources import log_level

EXIT_FAILED, EXIT_SETTINGS, EXIT_UNAVAILABLE = 1, 2, 3
"""EXIT_UNAVAILABLE: the ledger did not answer; a restart may succeed."""
FIRST_SIGNAL_CODE = 128
"""Exit codes from this value on mean that a signal ended a child process."""
MAX_LINE_CHARACTERS = 10_000
"""Maximum number of characters of a log message or traceback line: a peer's text may fill a frame."""


def configure_logging(name: str) -> None:
    """Write log lines to standard error: time, `name`, level, `event key=value`.

    Raises:
        SettingsError: `TETHER_LOG_LEVEL` names no level.
    """
    level = log_level(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s {name} %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


class LineFormatter(logging.Formatter):
    """Formatter that writes each record on one line, even if its arguments contain line breaks.

    Traceback lines may quote the arguments; they are indented, so that no line looks like a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _shorten(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return self.formatStack(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return "\n".join(f"    {_shorten(line)}" for line in stack_info.split("\n"))


def _shorten(text: str) -> str:
    """Return text as one line, truncated to `MAX_LINE_CHARACTERS`."""
    line = one_line(text[:MAX_LINE_CHARACTERS])
    if max(len(text), len(line)) <= MAX_LINE_CHARACTERS:
        return line
    return f"{line[:MAX_LINE_CHARACTERS]} ... (of {len(text)} characters)"


def describe_error(error: BaseException) -> tuple[str, int]:
    """Return a line and an exit code for an error that ends a process."""
    error = innermost(error)
    if isinstance(error, (SettingsError, Unavailable)):
        return _shorten(str(error)), EXIT_SETTINGS
    kind = "" if type(error) is TetherError else f"{type(error).__name__}: "
    return _shorten(f"{kind}{error}"), EXIT_FAILED


def exit_with(error: BaseException, name: str) -> NoReturn:
    """End the process `name`: print one line to stderr and exit with the error's code."""
    line, code = describe_error(error)
    print(f"{name}: {line}", file=sys.stderr)
    sys.exit(code)


def end_command(error: Exception) -> NoReturn:
    """End a `tether` command with one line; unreadable files give `EXIT_SETTINGS`.

    Raises:
        OSError: `error` is an OSError without a file name.
    """
    if isinstance(found := innermost(error), SpoolError):
        # a command only reads the run's records; a service would wait for disk space
        error = SettingsError(str(found))
    elif isinstance(error, OSError):  # such as a file of the run that belongs to another user
        if error.filename is None:
            raise error
        error = SettingsError(f"{error.filename}: {error.strerror}")
    exit_with(error, "tether")
