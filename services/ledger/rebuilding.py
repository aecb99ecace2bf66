"""Writing a run anew in memory, from a snapshot; see `Ledger.rebuild`."""

from collections import Counter
from collections.abc import Callable

from protocol.errors import Reason, Refused
from protocol.lifecycle import GroupState
from services.ledger.book import Book, Group
from services.ledger.interface import RunSpec, TakenGroup
from services.ledger.limits import check_spec
from services.ledger.snapshot import Snapshot

_S = GroupState


def rebuild(book: Book | None, spec: RunSpec, snapshot: Snapshot, clock: Callable[[], int]) -> Book:
    """The run as `snapshot` says; `book` is what the ledger holds now, or None if the run is not there."""
    check_spec(spec)
    if book is not None and book.epoch == snapshot.epoch:
        return book
    found = -1 if book is None else book.sequence
    if found != snapshot.found:
        raise Refused(Reason.WRONG_STATE, f"the ledger is at event {found}, not at {snapshot.found}")
    new = Book(spec, clock, spec.bound)
    new.version, new.digest, new.checkpoint = snapshot.version, snapshot.digest, snapshot.checkpoint
    new.epoch, new.epochs = snapshot.epoch, {*snapshot.epochs, snapshot.epoch}
    new.sequence, new.archived = snapshot.sequence, snapshot.after
    new.issued, new.trained, new.dropped = snapshot.issued, snapshot.trained, snapshot.dropped
    new.wasted_tokens, new.reasons = snapshot.wasted_tokens, Counter(snapshot.reasons)
    new.halted, new.draining = snapshot.halted, snapshot.draining
    new.steps = {record.step: record for record in snapshot.steps}
    new.step_reports = dict(snapshot.reports)
    for group in snapshot.scored:
        new.groups[group.group] = _held(group, _S.SCORED, snapshot)
    for number, attempt in snapshot.waiting.items():
        new.groups[number] = Group(number, attempt=attempt)
    for record in snapshot.steps:
        for group in record.groups:
            new.groups[group.group] = trained = _held(group, _S.TRAINED, snapshot)
            trained.step = record.step
    lists = {"scored": [group.group for group in snapshot.scored], "waiting": list(snapshot.waiting), "told": list(snapshot.told)}
    new.append(
        "rebuild", epoch=snapshot.epoch, after=snapshot.after, version=new.version, issued=new.issued, trained=new.trained,
        dropped=new.dropped, **{name: values for name, values in lists.items() if values},
    )  # fmt: skip
    return new


def _held(group: TakenGroup, state: GroupState, snapshot: Snapshot) -> Group:
    return Group(
        group.group, state, group.token, deadline=group.deadline, max_staleness=group.max_staleness, version=group.version,
        attempt=snapshot.attempts.get(group.group, 1), counts=dict(group.counts),
    )  # fmt: skip
