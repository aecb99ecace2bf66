"""Defines the answers of a rank to an engine's process about its staging copy."""

from enum import StrEnum

import msgspec

from rollout.engines.base import Served


class RankState(StrEnum):
    """State of a rank's staging copy."""

    IDLE = "idle"
    STAGING = "staging"
    """A thread fetches a version, also after the fetch was cancelled, until the thread has ended."""
    STAGED = "staged"
    FAILED = "failed"
    ASLEEP = "asleep"
    """The copy has no memory."""


class RankStatus(msgspec.Struct, frozen=True):
    """Staging copy of one rank."""

    state: RankState
    error: str = ""
    """Why the latest staging failed."""
    covered: int = 0
    """Bytes that the latest staging has verified and placed."""
    poisoned: bool = False
    """Whether live weights may be mixed, or this process cannot receive any more."""
    unfit: bool = False
    """Whether it failed because the version does not fit the engine."""
    staged: Served | None = None
    """Version in the copy; None unless the state is `STAGED`."""


class RankCommit(msgspec.Struct, frozen=True):
    """Outcome of a commit on one rank."""

    applied: bool
    error: str = ""
    poisoned: bool = False
    """Whether live weights may be mixed."""
    copy_ms: float = 0.0
    """Time of the copy, if it was applied."""
