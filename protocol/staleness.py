"""Computes the staleness bound: rule F, deadlines, per-token lag and the three policies, as pure functions.

Version v is the model after v committed batches. A token generated under version b and trained in the step
that starts from version k has lag k - b. E is the bound (`TETHER_MAX_STALENESS`), B the groups per step
(`TETHER_GROUPS_PER_STEP`), V the committed version, N the next step to take (V, or V + 1 while a step runs).

Rule F: at every moment, for every d >= N, at most (d - N + 1) * B live-leased and scored groups have a
deadline <= d. Then earliest-deadline-first scheduling meets every deadline. WAITING groups and expired leases
do not count: leasing or accepting them checks rule F again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Interval

MaxStaleness = Annotated[int, Interval(ge=0, le=1000)]
GroupsPerStep = Annotated[int, Interval(ge=1, le=10**6)]


class Policy(StrEnum):
    """Reaction when taking B scored groups would make an unscored group miss its deadline."""

    WAIT = "wait"  # the step waits for the straggler
    MASK = "mask"  # take anyway; only tokens within the bound of a late group carry gradient
    DROP = "drop"  # abort and drop unscored groups, earliest deadline first, until rule F holds


@dataclass(frozen=True, slots=True)
class Bound:
    """Staleness settings, which may change during a run."""

    max_staleness: MaxStaleness = 1
    """E: the largest lag, in versions, that a trained token may have."""
    groups_per_step: GroupsPerStep = 8
    """B: groups per step."""
    policy: Policy = Policy.MASK


def deadline(served_version: int, max_staleness: int) -> int:
    """Return the last step that may train a group generated under `served_version` without masking tokens."""
    return served_version + max_staleness


def effective_deadline(deadline: int, next_step: int, bound: Bound) -> int:
    """Return the deadline that rule F uses: under `mask`, a late group gets the latest deadline."""
    if bound.policy is Policy.MASK and deadline < next_step:
        return next_step + bound.max_staleness
    return deadline


def feasible(deadlines: Iterable[int], next_step: int, groups_per_step: int) -> bool:
    """Return whether rule F holds, so that all groups can be trained before their deadlines.

    Args:
        deadlines: effective deadlines of the groups, as step numbers.
        next_step: N.
        groups_per_step: B.
    """
    return all(count < (d - next_step + 1) * groups_per_step for count, d in enumerate(sorted(deadlines)))


def holds(deadlines: Iterable[int], next_step: int, bound: Bound) -> bool:
    """Return whether rule F holds for stored deadlines; the policy decides how late groups count."""
    return feasible(
        (effective_deadline(d, next_step, bound) for d in deadlines), next_step, bound.groups_per_step
    )


def admits(deadlines: Iterable[int], new: int, next_step: int, bound: Bound) -> bool:
    """Return whether a lease with deadline `new` may be granted: the deadline is in time and rule F holds."""
    return new >= next_step and holds([*deadlines, new], next_step, bound)


def is_published(version: int, newest: int, every: int, max_staleness: int) -> bool:
    """Return whether a committed version is published to engines.

    Every `every`-th version is published. A version is also published when the engines' version would exceed
    the bound: otherwise no lease could be granted, and no step could follow.

    Args:
        newest: the last published version.
        every: interval between published versions; 0: publish only when the bound requires it.
        max_staleness: E of the current bound.
    """
    behind = version - newest
    return behind > max_staleness or 0 < every <= behind


def lag(trained_at: int, generated_under: int) -> int:
    """Return the lag of a token in versions: version at the start of the step minus sampling version."""
    return trained_at - generated_under


def trainable_counts(trained_at: int, token_counts: Mapping[int, int], max_staleness: int) -> dict[int, int]:
    """Return the entries of `token_counts` (version -> tokens) within the bound in step `trained_at`."""
    return {v: n for v, n in token_counts.items() if n and lag(trained_at, v) <= max_staleness}
