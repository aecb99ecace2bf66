"""Computes the staleness bound: rule F, deadlines, per-token lag and the three policies, as pure functions.

Version v means "after v committed batches". A token generated under version b and trained in the step that
starts from version k has lag k - b. E is the bound (`TETHER_MAX_STALENESS`), B the groups of a step
(`TETHER_GROUPS_PER_STEP`), V the committed version, N the next step to take (V, or V + 1 while a step runs).

Rule F: at every moment, for every d >= N, the number of live-leased and scored groups with deadline <= d is
at most (d - N + 1) * B. Scheduling by earliest deadline first then meets every deadline. WAITING groups and
expired leases are not counted: rule F is checked again when they are leased or accepted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Interval

MaxStaleness = Annotated[int, Interval(ge=0, le=1000)]
GroupsPerStep = Annotated[int, Interval(ge=1, le=10**6)]


class Policy(StrEnum):
    """Choice for the case that taking B scored groups would make an unscored group miss its deadline."""

    WAIT = "wait"  # the step waits for the straggler
    MASK = "mask"  # take anyway; of a late group only tokens within the bound carry gradient
    DROP = "drop"  # abort and drop unscored groups, earliest deadline first, until rule F holds


@dataclass(frozen=True, slots=True)
class Bound:
    """The staleness settings, which may be changed while a run is on."""

    max_staleness: MaxStaleness = 1
    """E: the largest lag, in versions, that a trained token may have."""
    groups_per_step: GroupsPerStep = 8
    """B: groups per step."""
    policy: Policy = Policy.MASK


def deadline(served_version: int, max_staleness: int) -> int:
    """Return the last step that may train a group generated under `served_version` without masking tokens."""
    return served_version + max_staleness


def effective_deadline(deadline: int, next_step: int, bound: Bound) -> int:
    """Return the deadline that rule F uses; under `mask`, a group that is late already gets the latest."""
    if bound.policy is Policy.MASK and deadline < next_step:
        return next_step + bound.max_staleness
    return deadline


def feasible(deadlines: Iterable[int], next_step: int, groups_per_step: int) -> bool:
    """Return whether rule F holds: groups with these effective deadlines can all be trained in time.

    Args:
        deadlines: effective deadlines, in steps.
        next_step: N, the first step that can train them.
        groups_per_step: B.
    """
    return all(count < (d - next_step + 1) * groups_per_step for count, d in enumerate(sorted(deadlines)))


def holds(deadlines: Iterable[int], next_step: int, bound: Bound) -> bool:
    """Return whether rule F holds for stored deadlines, with late groups counted as the policy says."""
    return feasible(
        (effective_deadline(d, next_step, bound) for d in deadlines), next_step, bound.groups_per_step
    )


def admits(deadlines: Iterable[int], new: int, next_step: int, bound: Bound) -> bool:
    """Return whether a lease with deadline `new` may be granted: it is not late already, and rule F holds."""
    return new >= next_step and holds([*deadlines, new], next_step, bound)


def is_published(version: int, newest: int, every: int, max_staleness: int) -> bool:
    """Return whether engines get a committed version.

    They get every `every`-th one, and any at which their own would be over the bound: no lease would be
    granted, and no step could follow.

    Args:
        version: the committed one.
        newest: the one that was published last.
        every: versions from one to the next; 0: only the bound asks for one.
        max_staleness: E of the bound in force.
    """
    behind = version - newest
    return behind > max_staleness or 0 < every <= behind


def lag(trained_at: int, generated_under: int) -> int:
    """Return the lag of a token in versions: the version at the step's start less the one that sampled it."""
    return trained_at - generated_under


def trainable_counts(trained_at: int, token_counts: Mapping[int, int], max_staleness: int) -> dict[int, int]:
    """Return the part of `token_counts` (version -> tokens) that may carry gradient in step `trained_at`."""
    return {v: n for v, n in token_counts.items() if n and lag(trained_at, v) <= max_staleness}
