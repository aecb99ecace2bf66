"""Defines the parts of frames between the pool and its worker processes; `worker.py` lists the frames."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from reward.group import Verdict

LENGTH = struct.Struct("<I")
"""Length of a frame, in bytes, before it."""
MAX_FRAME = 1 << 22
"""Limit on a frame from a worker, bytes. The largest one holds one number per turn, or a short text."""


@dataclass(frozen=True, slots=True)
class GroupFrame:
    """A group, encoded for worker processes."""

    number: int
    """Different for each group of a pool."""
    data: bytes


class VerifierTraits(msgspec.Struct, array_like=True, frozen=True):
    """Properties of a verifier, known once a worker has imported it."""

    at_once: bool
    """Whether one call takes all samples of a group, instead of one sample."""
    awaits: bool
    """Whether its calls wait for something, many at a time, so that cancelling one costs no process."""
    by_turn: bool
    """Whether it scores each turn of a sample."""


class CallOutcome(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of a call in a worker process."""

    scores: Sequence[Verdict]
    """One for each sample of the call. Empty if there is an error."""
    error: str = ""
    """The error that the verifier raised, or how its process ended."""
    counts: Mapping[str, float] = {}
    """What happened, see `Notes`."""
    text: str = ""
    """Text of a judge."""
    problem: str = ""
    """What went wrong last, where there is no error."""
