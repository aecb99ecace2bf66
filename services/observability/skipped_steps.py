"""Describes steps that changed no weights, and why too many of them in a row halt a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LIKELY: Mapping[str, str] = {
    "bound": "bound.max_staleness, bound.staleness_policy, rollout.groups_in_flight, algorithm.truncated",
    "gradient": "optimizer.lr, trainer.dtype, algorithm.advantage_eps, the weights of rewards",
}
"""Word of the cause -> settings that lead to it."""


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Steps of a run that the optimizer skipped."""

    steps: int
    groups: int
    """Groups of these steps: committed as trained, but no weight has learned from them."""

    def __str__(self) -> str:
        return f"{self.steps} skipped step{'s' if self.steps != 1 else ''} of {self.groups} groups"


def count_skipped(lines: Iterable[Mapping[str, Any]]) -> SkippedSteps:
    """Count the skipped steps among lines of metrics.jsonl, one for each step."""
    groups = [int(line.get("groups", 0)) for line in lines if line.get("skipped")]
    return SkippedSteps(len(groups), sum(groups))


def warnings_of(status: Mapping[str, Any]) -> list[str]:
    """Return lines for `tether status`: that skipped steps count as trained; none if there were none."""
    if not status["skipped_steps"]:
        return []
    skipped = SkippedSteps(status["skipped_steps"], status["skipped_groups"])
    return [f"warning: {skipped}, counted as trained, changed no weights"]


def halt_cause(in_row: int, cause: str) -> str:
    """Return why a run is halted after `in_row` skipped steps, the last one for `cause`; one sentence."""
    settings = next((names for word, names in LIKELY.items() if word in cause), ", ".join(LIKELY.values()))
    return (
        f"{in_row} steps in a row were skipped and changed no weight (trainer.max_skipped_steps), the last "
        f"one because {cause}: check {settings}"
    )


class SkipLimit:
    """Counts skipped steps in a row; a step that is not skipped, and a halt, begin a new count."""

    def __init__(self, limit: int) -> None:
        """Count from 0; `limit` is `trainer.max_skipped_steps`."""
        self._limit = limit
        self._in_row = 0

    def cause_after(self, skipped: str) -> str:
        """Count a committed step, which was skipped for a cause or, if that is empty, was not.

        Returns:
            The cause to halt the run for; empty while there is none.
        """
        self._in_row = self._in_row + 1 if skipped else 0
        if self._in_row < self._limit:
            return ""
        found, self._in_row = self._in_row, 0
        return halt_cause(found, skipped)
