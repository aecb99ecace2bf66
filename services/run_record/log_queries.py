"""Reads a whole event log: the life of a group, the rewards of all groups, the prompts of the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import AcceptEvent, CreateEvent, DropEvent, GroupEvent, LedgerEvent
from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import Moment, trace


def group_moments(run_dir: Path, group: int) -> list[Moment]:
    """Return the moments of a group's life, oldest first.

    Raises:
        SettingsError: the log does not have the group; says which groups it has.
    """
    newest = -1

    def events() -> Iterator[LedgerEvent]:
        nonlocal newest
        for event in read_events(run_dir / FILE):
            if isinstance(event, GroupEvent):
                newest = max(newest, event.group)
            yield event

    moments = trace(events(), group)
    if not moments:
        known = f"groups 0 to {newest} are" if newest >= 0 else "no group is yet"
        raise SettingsError(
            f"group {group} is not in the log of {run_dir}; {known}: "
            "it was never leased, or its events are not archived yet"
        )
    return moments


def observed_rates(run_dir: Path) -> dict[int, float]:
    """Return group -> mean reward of its samples, as scored last; groups without signal are among them.

    Raises:
        SettingsError: the log cannot be read.
    """
    return {
        event.group: event.reward
        for event in read_events(run_dir / FILE)
        if isinstance(event, AcceptEvent | DropEvent) and event.reward is not None
    }


def prompt_fingerprint(run_dir: Path) -> str:
    """Return the fingerprint of the prompts that the run was created with; empty if the log does not say.

    Raises:
        SettingsError: the log cannot be read.
    """
    events = read_events(run_dir / FILE)
    return next((event.fingerprint for event in events if isinstance(event, CreateEvent)), "")


def filtered_group(group: int, reward: float | None, tokens: int, step: int | None) -> dict[str, Any]:
    """Describe a group that was dropped without signal, as JSON types.

    Args:
        group: its number.
        reward: of all its samples.
        tokens: its sampled tokens.
        step: the step before whose commit it was dropped; None: not known.
    """
    return {"group": group, "step": step, "reward": reward, "tokens": tokens}
