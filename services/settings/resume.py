"""Compares the settings of a resumed run with its last start, and keeps earlier settings.

RUN_DIR/settings_until_N.json contains the settings under which the events up to number N were created, for
tools that recompute earlier steps.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from protocol.errors import SettingsError
from protocol.host.atomic_file import write_atomically
from services.settings.load import FILE, recorded_settings
from services.settings.paths import path_mark
from services.settings.resume_rules import NOT_COMPARED, ResumeRule, decides_records, rule_of
from services.settings.sections import Settings
from services.settings.sources import to_toml

EARLIER = "settings_until_*.json"
"""Pattern of the files with settings of earlier starts."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting whose value differs from the last start."""

    dotted: str
    old: Any
    new: Any

    @property
    def rule(self) -> ResumeRule:
        """Rule that decides whether the setting may change."""
        return rule_of(self.dotted)[0]

    def __str__(self) -> str:
        return f"{self.dotted} {_format_value(self.old)} -> {_format_value(self.new)}"


def changes_since_last_start(settings: Settings) -> Sequence[Change]:
    """Return the differences from the settings of the run's last start; none for a new run.

    Raises:
        SettingsError: a fixed setting changed; the message has each setting, both values and the reason.
    """
    old = recorded_settings(settings.run_dir)
    if old is None:
        return ()
    changes = [change for change in differences(old, settings) if change.dotted not in NOT_COMPARED]
    check_fixed(changes, settings)
    return changes


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[Change]:
    """Yield the differences between two dataclasses of settings; nested sections are compared by field."""
    hints = get_type_hints(type(new), include_extras=True)
    for field in dataclasses.fields(new):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(before) and dataclasses.is_dataclass(now):
            yield from differences(before, now, f"{prefix}{field.name}.")
        elif before != now and not (path_mark(hints[field.name]) and _is_same_place(before, now)):
            yield Change(f"{prefix}{field.name}", before, now)


def check_fixed(changes: Sequence[Change], settings: Settings) -> None:
    """Reject changes of settings that must not change.

    Raises:
        SettingsError: a fixed setting changed; the message has each setting, both values and the reason.
    """
    untrained = any(change.dotted == "engine.draft_lr" and not change.old for change in changes)
    refused = {ResumeRule.FIXED}
    if settings.engine.draft_lr and not untrained:
        refused.add(ResumeRule.TRAINED)
    fixed = [change for change in changes if change.rule in refused]
    if fixed:
        problems = "; ".join(
            f"setting {change.dotted} is {_format_value(change.old)} in the run and "
            f"{_format_value(change.new)} now, and cannot change: {rule_of(change.dotted)[1]}"
            for change in fixed
        )
        raise SettingsError(
            f"{problems}. Go back to the old value, or start a new run in another directory than "
            f"{settings.run_dir} (docs/resume.md)"
        )


def check_drained(changes: Sequence[Change], waiting: int) -> None:
    """Reject changes that do not fit `waiting` groups, which are sampled and not trained yet.

    Raises:
        SettingsError: groups wait; the message has the first such setting and both values.
    """
    for change in changes:
        if change.rule is ResumeRule.DRAINED and waiting:
            raise SettingsError(
                f"setting {change.dotted} is {_format_value(change.old)} in the run and "
                f"{_format_value(change.new)} now: {rule_of(change.dotted)[1]}. "
                f"{waiting} groups wait: start the run with the old value, end it with `tether "
                "drain D`, and start it with the new one (docs/resume.md)"
            )


def keep_earlier(run_dir: Path, sequence: int, changes: Sequence[Change]) -> None:
    """Copy the settings of the last start if one of the changes affects steps or records.

    Args:
        run_dir: directory of the run.
        sequence: number of the newest event, created under the old settings.
        changes: changed settings of the current start.

    Raises:
        OSError: the file cannot be written.
    """
    path = run_dir / EARLIER.replace("*", str(sequence))
    if any(decides_records(change.dotted) for change in changes) and not path.exists():
        write_atomically(path, (run_dir / FILE).read_bytes())


def earlier_name(run_dir: Path, sequence: int) -> str:
    """Return the name of the settings file under which an event was created."""
    ends = {int(path.stem.rpartition("_")[2]): path.name for path in run_dir.glob(EARLIER)}
    return next((ends[end] for end in sorted(ends) if sequence <= end), FILE)


def _is_same_place(before: Any, now: Any) -> bool:
    """Return whether two paths resolve to the same file."""
    are_set = isinstance(before, str) and isinstance(now, str) and before and now
    return bool(are_set) and os.path.realpath(before) == os.path.realpath(now)


def _is_table(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        value = [dataclasses.asdict(item) if _is_table(item) else item for item in value]
    return to_toml(dataclasses.asdict(value) if _is_table(value) else value)
