"""A group while the event log is replayed."""

from dataclasses import dataclass, field

from protocol.lifecycle import GroupState


@dataclass(slots=True)
class ReplayedGroup:
    """A group as the log tells it."""

    state: GroupState = GroupState.WAITING
    token: str = ""
    deadline: int = 0
    bound: int = 0
    expired: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    """Accepts, takes and commits on the present path."""
    step: int = -1
    trained_lag: int = 0
