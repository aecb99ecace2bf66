"""Defines findings and alarms of an audit, and their sentences for users."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import ScoredRollout

ENGINE_CHECKS = frozenset({"logprob", "sampling", "copy"})
"""Checks of numbers and tokens that an engine computes."""


@dataclass(frozen=True, slots=True)
class FindingOrigin:
    """Place of a finding: group, sample and the processes that produced it."""

    group: int = -1
    """Number of the group; -1: no single group."""
    sample: int = -1
    engine: str = ""
    scorer: str = ""

    @classmethod
    def from_scored(cls, scored: ScoredRollout, sample: int = -1) -> "FindingOrigin":
        """Return the place of a scored group, or of one of its samples."""
        rollout = scored.rollout
        return cls(rollout.group, sample, rollout.engine, scored.scorer)


@dataclass(frozen=True, slots=True)
class Finding:
    """Contradiction between a record and a recomputation; requires no statistics."""

    check: str
    """Name of the check."""
    origin: FindingOrigin
    detail: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Fault of the run, reported once per check and place."""

    check: str
    step: int
    """Step in which the fault was found."""
    since: int
    """Step since which the evidence is strongest."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Axis -> value to which the differences are confined, such as engine, version or tensor."""
    detail: str = ""
    chance: float = 0.0
    """Bound on the probability of this evidence in a run without the fault; 0 for a contradiction."""
    group: int = -1
    sample: int = -1
    """Sample of the smallest example; -1 without an example."""

    @property
    def is_engine_fault(self) -> bool:
        """Whether the named engine computed the difference."""
        return self.check in ENGINE_CHECKS

    @property
    def reproduction(self) -> str:
        """Command that rebuilds the step of the example with `tether replay`."""
        return f"tether replay D --step {self.step}" if self.step >= 0 else ""

    def sentence(self) -> str:
        """Return a sentence with fault, place, first step and the command that shows the fault again."""
        where = ", ".join(f"{axis} {value}" for axis, value in self.where.items())
        example = f"; example: group {self.group}, sample {self.sample}" if self.sample >= 0 else ""
        chance = f"; by chance with probability {self.chance:.0e} at most" if self.chance else ""
        return (
            f"audit.{self.check}: {self.detail}{f' ({where})' if where else ''}, since step {self.since}"
            f"{example}{chance}; reproduce: {self.reproduction}"
        )
