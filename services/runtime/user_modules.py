"""Enables user code in a process: modules of `run.modules`, and code of trusted models."""

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.device.hf_models import trust_model_code
from protocol.errors import SettingsError
from services.settings.sections import Settings


def add_user_modules(settings: Settings) -> Sequence[str]:
    """Append the directories of `run.modules` to this process's `sys.path`, and return them.

    The directories come last, so that no file in them can replace a module of Python, tether or a library. A
    process that starts child processes passes the directories on, as `reward.workers.pool.ScorePool` does.
    Code in model directories is trusted from then on if `model.trust_remote_code` is set.

    Raises:
        SettingsError: a directory does not exist.
    """
    trust_model_code(settings.model.trust_remote_code)
    for directory in settings.run.modules:
        if not Path(directory).is_dir():
            raise SettingsError(f"setting run.modules: there is no directory {directory}")
    sys.path.extend(directory for directory in settings.run.modules if directory not in sys.path)
    return settings.run.modules
