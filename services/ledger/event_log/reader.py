"""The steps of a run as its event log tells them: what each took, under which leases, and what was
trained."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from services.ledger.interface import StepRecord, TakenGroup
from services.ledger.redis.json_codec import decode_counts

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A committed step, as the log tells it."""

    record: StepRecord
    trained: Mapping[int, Mapping[int, int]]
    """Group -> version -> tokens that carried gradient."""


def read_events(path: Path) -> Iterator[Event]:
    """Every whole line of a log, oldest first; a torn last line is left out.

    Raises:
        SettingsError: there is no log, or a line is not an event; names it.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise SettingsError(
            f"no event log {path}: {error.strerror or error}; give the directory of a run, such as runs/demo"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise SettingsError(f"{path}: line {number} is not an event; see `tether verify`")
            yield event


def with_journal_events(events: Iterable[Event]) -> Iterator[Event]:
    """The events, and before each `rebuild` those that the journal told it, at its time (see
    `restore.py`)."""
    for event in events:
        if event["event"] == "rebuild":
            place = {"seq": event["seq"], "time_ms": event["time_ms"]}
            for told in event.get("told", ()):
                yield from ({**accept, **place, "event": "accept"} for accept in told.get("accepted", ()))
                yield {**told, **place}
        yield event


def committed_steps(events: Iterable[Event], wanted: range) -> dict[int, LoggedStep]:
    """Steps in `wanted` on the path to the present version, by number; what a rewind abandoned is left out.

    Raises:
        SettingsError: if an event contradicts the ones before it.
    """
    steps: dict[int, LoggedStep] = {}
    leases: dict[int, Event] = {}
    counts: dict[int, Event] = {}
    taken: list[int] = []
    for event in with_journal_events(events):
        kind = event["event"]
        try:
            if kind == "lease":
                leases[event["group"]] = event
            elif kind == "accept":
                counts[event["group"]] = event["counts"]
                if "deadline" in event:  # told by the journal, with what the lease said
                    leases[event["group"]] = event
            elif kind == "drop":  # trained groups go, too: after a rewind they are leased again
                leases.pop(event["group"], None), counts.pop(event["group"], None)
            elif kind == "take":
                taken = list(event["groups"])
            elif kind == "commit":
                numbers = [int(group) for group in event["groups"]]
                if sorted(numbers) != sorted(
                    taken
                ):  # the take is lost; this is the order in which groups are taken
                    taken = sorted(numbers, key=lambda group: (leases[group]["deadline"], group))
                groups = tuple(_taken_group(leases.pop(group), counts.pop(group)) for group in taken)
                if event["step"] in wanted:
                    steps[event["step"]] = _logged(event, groups)
            elif kind == "resume" and not event["continued"]:
                steps = {step: logged for step, logged in steps.items() if step < event["version"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"event {event.get('seq')} ({kind}) does not fit the ones before it; see `tether verify`"
            ) from error
    return steps


def _logged(commit: Event, groups: tuple[TakenGroup, ...]) -> LoggedStep:
    record = StepRecord(commit["step"], commit["epoch"], int(commit["digest"]), groups)
    return LoggedStep(
        record, {int(group): decode_counts(counts) for group, counts in commit["groups"].items()}
    )


def _taken_group(lease: Event, counts: Mapping[str, int]) -> TakenGroup:
    return TakenGroup(
        lease["group"],
        lease["token"],
        lease["deadline"],
        lease["bound"],
        lease["version"],
        decode_counts(counts),
    )
