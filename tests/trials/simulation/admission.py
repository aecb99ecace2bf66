"""Defines ways to admit leases beyond rule F, so that they come less in waves; `waves` compares them.

B is the groups of a step, E the bound. Each rule only withholds leases that rule F would allow.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """What an admission rule knows when an engine asks for a lease."""

    groups_per_step: int
    max_staleness: int
    same_version: int
    """Groups in flight or scored that were leased under the version of the new lease."""
    live: int
    """Groups that are being generated."""
    late_live: int
    """Those of `live` with an earlier deadline than the new lease."""
    since_lease_s: float
    """Since the last lease was granted."""
    step_period_s: float
    """Smoothed time between two commits; 0 before the second."""


Admission = Callable[[View], bool]


def _half_window(view: View) -> bool:
    return view.same_version < view.groups_per_step * (1 + view.max_staleness / 2)


def _one_batch(view: View) -> bool:
    return view.same_version < view.groups_per_step


def _paced(view: View) -> bool:
    return view.since_lease_s >= view.step_period_s / (2 * view.groups_per_step)


def _finish_first(view: View) -> bool:
    return view.late_live <= view.groups_per_step / 2


ADMISSIONS: dict[str, Admission] = {
    "greedy": lambda view: True,
    "half window": _half_window,
    "one batch": _one_batch,
    "paced": _paced,
    "finish first": _finish_first,
}
"""Name -> rule. `greedy` is what the ledger does: rule F alone.

`half window` grants at most B (1 + E/2) leases of one version, `one batch` at most B. `paced` is a bucket of
one token, filled twice as fast as steps use groups. `finish first` waits until at most B/2 groups with an
earlier deadline are being generated.
"""
