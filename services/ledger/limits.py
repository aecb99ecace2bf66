"""Validates the limits of a run: its bound, and the limits that drop a group or halt the run."""

from protocol.errors import SettingsError
from protocol.staleness import Bound
from protocol.validation import check_range
from services.ledger.interface import RunSpec

ARCHIVE_LIMIT = 200_000
"""Maximum number of events that wait for the archive before leasing stops."""
MAX_DETAIL = 300
"""Maximum number of characters of an error in the event log."""


def check_bound(max_staleness: int | None, groups_per_step: int | None) -> None:
    """Validate a bound. Raises SettingsError if it is out of range."""
    for name, value in (("max_staleness", max_staleness), ("groups_per_step", groups_per_step)):
        if value is not None:
            check_range(Bound, name, value, name)


def check_spec(spec: RunSpec) -> None:
    """Validate the limits of a run. Raises SettingsError if one is out of range."""
    check_bound(spec.bound.max_staleness, spec.bound.groups_per_step)
    if min(spec.steps, spec.prompts or 0) < 0 or min(spec.max_attempts, spec.drop_window) < 1:
        raise SettingsError(
            f"run {spec.run}: steps and prompts are 0 or more, max_attempts and drop_window 1 or more"
        )
    if not 0 < spec.drop_share <= 1:
        raise SettingsError(f"drop_share is {spec.drop_share}; it is a share, above 0 and at most 1")
