"""What the event log of a run proves."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What `verify` found; trained groups are those on the path to the present version."""

    issued: int
    trained: int
    dropped: int
    active: int
    max_lag: int
    """Largest lag of a trained token."""
    bound: int
    """Largest bound recorded with the lease of a trained group."""
    steps: int
    """Committed steps on the path to the present version."""
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations
