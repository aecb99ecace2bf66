"""Defines the contents of frames between the pool and its worker processes; `worker.py` lists the frames."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from reward.group import Verdict

LENGTH = struct.Struct("<I")
"""Format of the length prefix of a frame, bytes."""
MAX_FRAME = 1 << 22
"""Maximum size of a frame from a worker, bytes. The largest frame has one number per turn, or a short
text."""


@dataclass(frozen=True, slots=True)
class GroupFrame:
    """A group, encoded for worker processes."""

    number: int
    """Unique number within a pool."""
    data: bytes


class VerifierTraits(msgspec.Struct, array_like=True, frozen=True):
    """Properties of a verifier, known once a worker has imported it."""

    at_once: bool
    """Whether one call scores all samples of a group instead of one sample."""
    awaits: bool
    """Whether calls run concurrently, so cancelling a call does not end the process."""
    by_turn: bool
    """Whether the verifier scores each turn of a sample."""


class CallOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of a call in a worker process."""

    scores: Sequence[Verdict]
    """One entry per sample of the call; empty after an error."""
    error: str = ""
    """Exception of the verifier, or how its process ended."""
    counts: Mapping[str, float] = {}
    """Counts of events, see `Notes`."""
    text: str = ""
    """Answer of a judge."""
    problem: str = ""
    """Most recent problem of a call without an error."""
