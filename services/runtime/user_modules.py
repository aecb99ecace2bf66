"""Makes a user's own Python modules importable: those in the directories of `run.modules`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import SettingsError
from services.settings.sections import Settings


def add_user_modules(settings: Settings) -> Sequence[str]:
    """Append the directories of `run.modules` to this process's `sys.path`, and return them.

    They come last, so that no file in them can replace a module of Python, of tether or of a library. A
    process that starts others hands the directories on, as `reward.workers.pool.ScorePool` does.

    Raises:
        SettingsError: a directory does not exist.
    """
    for directory in settings.run.modules:
        if not Path(directory).is_dir():
            raise SettingsError(f"setting run.modules: there is no directory {directory}")
    sys.path.extend(directory for directory in settings.run.modules if directory not in sys.path)
    return settings.run.modules
