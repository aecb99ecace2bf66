"""Turns an error that ends a process into one line and an exit code, and sets up logging.

Exit codes: 0 drained, `EXIT_FAILED` 1, `EXIT_SETTINGS` 2.
"""

import logging
import os
import sys

from protocol.errors import SettingsError, Unavailable

EXIT_FAILED, EXIT_SETTINGS = 1, 2


def configure_logging(name: str) -> None:
    """Write log lines to standard error: time, `name`, level, `event key=value`.

    `TETHER_LOG_LEVEL` sets the level; INFO by default.
    """
    level = os.environ.get("TETHER_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=f"%(asctime)s {name} %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.captureWarnings(True)


def innermost(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, or `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> tuple[str, int]:
    """Return one line and an exit code for an error that ends a process."""
    error = innermost(error)
    if isinstance(error, (SettingsError, Unavailable)):
        return str(error), EXIT_SETTINGS
    return f"{type(error).__name__}: {error}", EXIT_FAILED
