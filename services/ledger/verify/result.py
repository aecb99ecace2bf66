"""Defines what a verified event log proves."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Counters and violations that `verify` found.

    Trained groups are those on the path to the committed version.
    """

    issued: int
    """Groups ever leased."""
    trained: int
    """Groups that are TRAINED at the end of the log."""
    dropped: int
    """Groups that are DROPPED."""
    active: int
    """Groups in any other state."""
    max_lag: int
    """Largest lag of a trained token, in versions."""
    bound: int
    """Largest bound recorded with the lease of a trained group, in versions."""
    steps: int
    """Committed steps on the path to the committed version."""
    violations: list[str] = field(default_factory=list)
    """What contradicts the lifecycle or the bound; each names its event."""

    @property
    def ok(self) -> bool:
        """Whether there is no violation."""
        return not self.violations
