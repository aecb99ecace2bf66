"""What a ledger is to hold after it lost acknowledged writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.ledger.interface import StepRecord, TakenGroup


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a run; `services/ledger/restore.py` makes it, `Ledger.rebuild` writes it."""

    epoch: str
    """A new one, nobody's: it fences whoever held the run."""
    epochs: tuple[str, ...]
    """Every one that ever claimed the run."""
    found: int
    """Number of the last event when the ledger was looked at; -1 if the run was not there."""
    after: int
    """Number of the last event in the archive; those up to `sequence` are lost."""
    sequence: int
    """Highest number that anybody noted; events go on above it."""
    version: int
    digest: int | None
    checkpoint: int
    issued: int
    trained: int
    dropped: int
    wasted_tokens: int
    reasons: Mapping[str, int]
    halted: str
    draining: bool
    scored: tuple[TakenGroup, ...]
    waiting: Mapping[int, int]
    """Every other active group -> leases that it had."""
    attempts: Mapping[int, int]
    """The same for scored and trained groups, where it is not 1."""
    steps: tuple[StepRecord, ...]
    """Committed steps that no checkpoint covers."""
    reports: Mapping[int, bytes]
    told: tuple[Mapping[str, Any], ...] = ()
    """Accepts and commits that only the journal knew, as events."""
