"""Queries a whole event log: history of a group, rewards of all groups, fingerprint of the prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import AcceptEvent, CreateEvent, DropEvent, GroupEvent, LedgerEvent
from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import Moment, trace


def group_moments(run_dir: Path, group: int) -> list[Moment]:
    """Return the events of a group, oldest first.

    Raises:
        SettingsError: the log lacks the group; the message says which groups it has.
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
    """Return group -> mean reward of its samples when scored last, including groups without signal.

    Raises:
        SettingsError: the log cannot be read.
    """
    return {
        event.group: event.reward
        for event in read_events(run_dir / FILE)
        if isinstance(event, AcceptEvent | DropEvent) and event.reward is not None
    }


def prompt_fingerprint(run_dir: Path) -> str:
    """Return the prompt fingerprint with which the run was created; empty if the log lacks it.

    Raises:
        SettingsError: the log cannot be read.
    """
    events = read_events(run_dir / FILE)
    return next((event.fingerprint for event in events if isinstance(event, CreateEvent)), "")


def filtered_group(group: int, reward: float | None, tokens: int, step: int | None) -> dict[str, Any]:
    """Describe a group that was dropped without signal, as JSON types.

    Args:
        group: number of the group.
        reward: mean reward of its samples.
        tokens: number of its sampled tokens.
        step: step before whose commit the group was dropped; None if unknown.
    """
    return {"group": group, "step": step, "reward": reward, "tokens": tokens}
