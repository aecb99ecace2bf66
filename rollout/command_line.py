"""Ends programs started by `python -m` with one line and an exit code instead of a traceback."""

import functools
import sys
from collections.abc import Callable

from protocol.errors import SettingsError

EXIT_SETTINGS = 2
"""Exit code if the user must change something."""
Main = Callable[[list[str]], int]


def errors_as_exit_code(main: Main) -> Main:
    """Make `main` print errors about settings, files and servers as one line, and return `EXIT_SETTINGS`."""

    @functools.wraps(main)
    def run(arguments: list[str]) -> int:
        try:
            return main(arguments)
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (SettingsError, RuntimeError) as error:
            text = str(error)
        print(" ".join(text.split()), file=sys.stderr)
        return EXIT_SETTINGS

    return run
