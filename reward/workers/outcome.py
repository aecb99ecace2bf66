"""Defines what comes back from one call of a verifier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reward.group import Verdict


@dataclass(frozen=True, slots=True)
class GroupFrame:
    """A group, encoded for worker processes."""

    number: int
    """Different for each group of a pool."""
    data: bytes


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call in a worker process."""

    scores: Sequence[Verdict]
    """One for each sample of the call. Empty if there is an error."""
    error: str = ""
    """What the verifier raised, or how its process ended."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What happened, see `Notes`."""
    text: str = ""
    """What a judge said."""
    problem: str = ""
    """What went wrong last, where there is no error."""
