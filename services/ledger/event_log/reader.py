"""Reads the steps of a run from its event log: the groups of each step, their leases and trained tokens."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import SettingsError, error_text
from services.ledger.event_log.events import (
    AcceptEvent,
    CommitEvent,
    DropEvent,
    LeaseEvent,
    LedgerEvent,
    MalformedEvent,
    RebuildEvent,
    ResumeEvent,
    TakeEvent,
    decode_line,
)
from services.ledger.interface import JournalAccept, JournalCommit, JournalEvent, StepRecord, TakenGroup


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A committed step as recorded in the log."""

    record: StepRecord
    """The ledger's record of the step."""
    trained: Mapping[int, Mapping[int, int]]
    """Group -> version -> number of tokens with a gradient."""
    sequence: int = field(default=0, compare=False)
    """Number of the event that contains the commit."""


def read_events(path: Path) -> Iterator[LedgerEvent]:
    """Yield every complete line of a log, oldest first; a torn last line is skipped.

    Raises:
        SettingsError: there is no log, or a line is not an event; the message names the line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                event = decode_line(line)
                if isinstance(event, MalformedEvent):
                    raise SettingsError(f"{path}: line {number} is not an event; see `tether verify`")
                yield event
    except OSError as error:
        raise SettingsError(
            f"no event log {path}: {error_text(error)}; give the directory of a run, such as runs/demo"
        ) from error


def with_journal_events(
    events: Iterable[LedgerEvent],
) -> Iterator[tuple[LedgerEvent, LedgerEvent | JournalEvent]]:
    """Yield the events; before each `rebuild`, also yield its events from the journal.

    Yields:
        Pairs of the logged event, which has number and time, and the effective event: the same event or one
            from the journal.
    """
    for event in events:
        if isinstance(event, RebuildEvent):
            for journal_event in event.journal_events:
                if isinstance(journal_event, JournalCommit):
                    yield from ((event, accepted) for accepted in journal_event.accepted)
                yield event, journal_event
        yield event, event


def committed_steps(events: Iterable[LedgerEvent], steps: range) -> dict[int, LoggedStep]:
    """Return the committed steps in `steps` by number, without the steps that a rewind abandoned.

    Raises:
        SettingsError: an event contradicts earlier events.
    """
    builder = _StepsBuilder(steps)
    for place, event in with_journal_events(events):
        try:
            builder.apply(event, place.seq)
        except (KeyError, ValueError) as error:
            raise SettingsError(
                f"event {place.seq} ({place.kind}) does not fit the ones before it; see `tether verify`"
            ) from error
    return builder.steps


class _StepsBuilder:
    """Collects committed steps from events, oldest first."""

    def __init__(self, steps: range) -> None:
        self.steps: dict[int, LoggedStep] = {}
        self._steps_range = steps
        self._leases: dict[int, LeaseEvent | JournalAccept] = {}
        """Group -> its last lease, for groups that are not trained."""
        self._counts: dict[int, Mapping[int, int]] = {}
        """Group -> number of accepted tokens by version."""
        self._taken: list[int] = []
        """Groups of the running step, in order."""

    def apply(self, event: LedgerEvent | JournalEvent, sequence: int) -> None:
        """Apply one event, numbered `sequence` in the log.

        Raises KeyError or ValueError if the event contradicts earlier events.
        """
        match event:
            case LeaseEvent():
                self._leases[event.group] = event
            case AcceptEvent():
                self._counts[event.group] = event.counts
            case JournalAccept():
                self._counts[event.group] = event.counts
                self._leases[event.group] = event
            case DropEvent():  # also removes a trained group that was leased again after a rewind
                self._leases.pop(event.group, None)
                self._counts.pop(event.group, None)
            case TakeEvent():
                self._taken = event.groups
            case CommitEvent() | JournalCommit():
                self._commit(event, sequence)
            case ResumeEvent(continued=False):
                self.steps = {step: logged for step, logged in self.steps.items() if step < event.version}

    def _commit(self, event: CommitEvent | JournalCommit, sequence: int) -> None:
        taken = self._taken
        if sorted(event.groups) != sorted(taken):  # the take event is lost: restore the order of a take
            taken = sorted(event.groups, key=lambda group: (self._leases[group].deadline, group))
        groups = tuple(_taken_group(self._leases.pop(group), self._counts.pop(group)) for group in taken)
        if event.step in self._steps_range:
            record = StepRecord(event.step, event.epoch, int(event.digest), groups)
            self.steps[event.step] = LoggedStep(record, event.groups, sequence)


def _taken_group(lease: LeaseEvent | JournalAccept, counts: Mapping[int, int]) -> TakenGroup:
    return TakenGroup(lease.group, lease.token, lease.deadline, lease.bound, lease.version, counts)
