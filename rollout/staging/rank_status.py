"""Defines a rank's replies to the engine's process about its staging copy."""

from enum import StrEnum

import msgspec

from rollout.engines.base import Served


class RankState(StrEnum):
    """State of a rank's staging copy."""

    IDLE = "idle"
    STAGING = "staging"
    """A thread fetches a version; after a cancellation, until the thread has ended."""
    STAGED = "staged"
    FAILED = "failed"
    ASLEEP = "asleep"
    """The copy's memory is released."""


class RankStatus(msgspec.Struct, frozen=True):
    """Status of one rank's staging copy."""

    state: RankState
    error: str = ""
    """Why the last staging failed."""
    covered: int = 0
    """Bytes verified and placed by the last staging."""
    poisoned: bool = False
    """Whether live weights may be mixed, or this process cannot receive versions any more."""
    unfit: bool = False
    """Whether staging failed because the version does not fit the engine."""
    staged: Served | None = None
    """Staged version; None unless the state is `STAGED`."""


class RankCommit(msgspec.Struct, frozen=True):
    """Result of a commit on one rank."""

    applied: bool
    error: str = ""
    poisoned: bool = False
    """Whether live weights may be mixed."""
    copy_ms: float = 0.0
    """Duration of the copy, if applied."""
