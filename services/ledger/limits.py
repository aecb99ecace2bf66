"""Limits that every ledger has, and what a run may ask for."""

from protocol.errors import SettingsError
from services.ledger.interface import RunSpec

ARCHIVE_LIMIT = 200_000
"""Events that may wait for the archive before leasing stops."""


def check_bound(max_staleness: int | None, groups_per_step: int | None) -> None:
    """Raise SettingsError for a bound that no run can have."""
    if max_staleness is not None and max_staleness < 0:
        raise SettingsError(f"max_staleness is {max_staleness}; it counts versions, 0 or more")
    if groups_per_step is not None and groups_per_step < 1:
        raise SettingsError(f"groups_per_step is {groups_per_step}; a step needs at least 1 group")


def check_spec(spec: RunSpec) -> None:
    """Raise SettingsError for a run that cannot be."""
    check_bound(spec.bound.max_staleness, spec.bound.groups_per_step)
    if spec.steps < 0 or spec.max_attempts < 1 or spec.drop_window < 1 or (spec.prompts is not None and spec.prompts < 0):
        raise SettingsError(f"run {spec.run}: steps and prompts are 0 or more, max_attempts and drop_window 1 or more")
    if not 0 < spec.drop_share <= 1:
        raise SettingsError(f"drop_share is {spec.drop_share}; it is a share, above 0 and at most 1")
