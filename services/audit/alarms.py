"""Defines findings and alarms of an audit, and the sentence that people read of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import ScoredRollout

OF_ENGINES = frozenset({"logprob", "sampling", "copy"})
"""Checks of the numbers and tokens that an engine computes."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Place of a finding: group, sample and the processes that made it."""

    group: int = -1
    """-1: no single group."""
    sample: int = -1
    engine: str = ""
    scorer: str = ""

    @classmethod
    def of(cls, scored: ScoredRollout, sample: int = -1) -> "Culprit":
        """Return the place of a scored group, or of one of its samples."""
        rollout = scored.rollout
        return cls(rollout.group, sample, rollout.engine, scored.scorer)


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction between a record and another party's computation; it needs no statistics."""

    check: str
    """Name of the check, a row of a table of checks."""
    place: Culprit
    detail: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault of the run, reported once for each check and place."""

    check: str
    step: int
    """In which it was found."""
    since: int
    """The step from which on the evidence is strongest."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Axis -> value to which the differences are confined, such as engine, version or tensor."""
    detail: str = ""
    chance: float = 0.0
    """Bound on the probability that a run without the fault gives such evidence; 0: it is a contradiction."""
    group: int = -1
    sample: int = -1
    """Sample of the smallest example, -1 without one."""

    @property
    def is_of_engine(self) -> bool:
        """Whether the engine that it names computed the difference."""
        return self.check in OF_ENGINES

    @property
    def reproduction(self) -> str:
        """Arguments that make `tether replay D` build the step with the example again."""
        return f"tether replay D --step {self.step}" if self.step >= 0 else ""

    def sentence(self) -> str:
        """Return what was found, where and since when, and how to see it again."""
        where = ", ".join(f"{axis} {value}" for axis, value in self.where.items())
        example = f"; example: group {self.group}, sample {self.sample}" if self.sample >= 0 else ""
        chance = f"; by chance with probability {self.chance:.0e} at most" if self.chance else ""
        return (
            f"audit.{self.check}: {self.detail}{f' ({where})' if where else ''}, since step {self.since}"
            f"{example}{chance}; see it again: {self.reproduction}"
        )
