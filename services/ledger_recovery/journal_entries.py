"""Encodes accepts and commits for the spool's journal, and decodes them to rebuild a ledger."""

import base64
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from protocol.errors import ProtocolError
from services.ledger.interface import JournalAccept, JournalCommit, JournalEvent, TakenBatch, TakenGroup
from trainer.storage.stored import JournalEntry


def accept_entry(epoch: str, accepted: Sequence[TakenGroup], sequence: int) -> JournalEntry:
    """Return the journal entry for accepted groups.

    Args:
        epoch: epoch that holds the run.
        accepted: groups as returned by `Ledger.accept`.
        sequence: number of the ledger's newest event after the accepts, or of a later event.
    """
    groups = tuple(group.group for group in accepted)
    details = {"accepted": [_accept(group) for group in accepted]}
    return JournalEntry(
        "accept", epoch, -1, groups, sequence, details=msgspec.to_builtins(details, str_keys=True)
    )


def commit_entry(
    epoch: str,
    batch: TakenBatch,
    trained: Mapping[int, Mapping[int, int]],
    sequence: int,
    *,
    digest: int,
    report: bytes,
) -> JournalEntry:
    """Return the journal entry for a step's commit; the arguments are those of `Ledger.commit`.

    Args:
        epoch: epoch that holds the run.
        batch: batch of the step.
        trained: group -> number of tokens with a gradient, by version.
        sequence: number of the ledger's newest event after the commit, or of a later event.
        digest: digest of the new version's weights.
        report: encoded `StepReport`.
    """
    details = {
        "digest": str(digest),
        "groups": trained,
        "accepted": [_accept(group) for group in batch.groups],
        "report": base64.b64encode(report).decode(),
    }
    groups = tuple(group.group for group in batch.groups)
    return JournalEntry(
        "commit", epoch, batch.step, groups, sequence, details=msgspec.to_builtins(details, str_keys=True)
    )


def replayable_events(entry: JournalEntry) -> Iterator[JournalEvent]:
    """Yield a journal entry as events for `SnapshotBuilder.apply_journal`.

    Raises:
        ProtocolError: the details do not match the kind of entry.
    """
    try:
        if entry.event == "accept":
            accepted = entry.details.get("accepted", [])
            yield from msgspec.convert(accepted, list[JournalAccept], str_keys=True)
        elif entry.event == "commit" and "digest" in entry.details:
            fields = {"event": "commit", "epoch": entry.epoch, "step": entry.step, **entry.details}
            yield msgspec.convert(fields, JournalCommit, str_keys=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"journal entry {entry.position}: {error}") from error


def entry_report(entry: JournalEntry) -> bytes | None:
    """Return the encoded `StepReport` of a commit; None if the entry has none."""
    report = entry.details.get("report")
    return None if report is None else base64.b64decode(report)


def _accept(group: TakenGroup) -> JournalAccept:
    return JournalAccept(
        group=group.group,
        token=group.token,
        version=group.version,
        deadline=group.deadline,
        bound=group.max_staleness,
        counts=dict(group.counts),
    )
