"""What the journal in the spool notes of accepts and commits, and how a ledger that lost them is told."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.ledger.interface import Taken, TakenGroup
from services.ledger.redis.json_codec import encode_counts
from trainer.storage.spool import JournalEntry


def accept_entry(epoch: str, accepted: Sequence[TakenGroup], sequence: int) -> JournalEntry:
    """Groups that the ledger has accepted; `sequence` is that of its last event, or of a later one."""
    groups = tuple(group.group for group in accepted)
    return JournalEntry(
        "accept", epoch, -1, groups, sequence, details={"accepted": [_accept(group) for group in accepted]}
    )


def commit_entry(
    epoch: str,
    taken: Taken,
    trained: Mapping[int, Mapping[int, int]],
    sequence: int,
    *,
    digest: int,
    report: bytes,
) -> JournalEntry:
    """The commit of a step; arguments as those of `Ledger.commit`."""
    details = {
        "digest": str(digest),
        "groups": {str(group): encode_counts(counts) for group, counts in trained.items()},
        "accepted": [_accept(group) for group in taken.groups],
        "report": base64.b64encode(report).decode(),
    }
    return JournalEntry(
        "commit", epoch, taken.step, tuple(group.group for group in taken.groups), sequence, details=details
    )


def replayable_events(entry: JournalEntry) -> Iterator[Mapping[str, Any]]:
    """A journal entry as events for `Restorer.tell`; nothing for an entry from before there were details."""
    if entry.event == "accept":
        yield from entry.details.get("accepted", ())
    elif entry.event == "commit" and "digest" in entry.details:
        fields = {name: entry.details[name] for name in ("digest", "groups", "accepted")}
        yield {"event": "commit", "epoch": entry.epoch, "step": entry.step, **fields}


def report_of(entry: JournalEntry) -> bytes | None:
    """The encoded `StepReport` of a commit, if the entry has it."""
    report = entry.details.get("report")
    return None if report is None else base64.b64decode(report)


def _accept(group: TakenGroup) -> dict[str, Any]:
    values = {
        "group": group.group,
        "token": group.token,
        "version": group.version,
        "deadline": group.deadline,
    }
    return {"event": "accept", **values, "bound": group.max_staleness, "counts": encode_counts(group.counts)}
