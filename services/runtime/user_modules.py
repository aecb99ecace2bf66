"""Lets a process run a user's own Python code: modules of `run.modules`, and a model's if it is trusted."""

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.device.hf_models import trust_model_code
from protocol.errors import SettingsError
from services.settings.sections import Settings


def add_user_modules(settings: Settings) -> Sequence[str]:
    """Append the directories of `run.modules` to this process's `sys.path`, and return them.

    They come last, so that no file in them can replace a module of Python, of tether or of a library. A
    process that starts others hands the directories on, as `reward.workers.pool.ScorePool` does. Model
    directories may bring code from then on if `model.trust_remote_code` says so.

    Raises:
        SettingsError: a directory does not exist.
    """
    trust_model_code(settings.model.trust_remote_code)
    for directory in settings.run.modules:
        if not Path(directory).is_dir():
            raise SettingsError(f"setting run.modules: there is no directory {directory}")
    sys.path.extend(directory for directory in settings.run.modules if directory not in sys.path)
    return settings.run.modules
