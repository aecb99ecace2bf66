"""Turns the times of decode steps into what a request sees: gaps between tokens and tokens per second.

Both are given for each kind of work that ran at the same time.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

UNDISTURBED = "undisturbed"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the engine, as its worker sees it begin."""

    at: float
    """Seconds, of the machine's monotonic clock."""
    requests: int
    """That get a token from it."""
    prefill: bool
    """Whether it computes prompts too: it takes longer then, whatever else runs."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of an update, or between updates."""

    name: str
    began: float
    ended: float

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1e3


def gaps_by_phase(
    times: Sequence[float], phases: Sequence[Phase], prefills: Sequence[float] = ()
) -> list[list[float]]:
    """Milliseconds between neighbouring `times`, for each phase those that it touches and no later phase
    does.

    Args:
        times: ascending.
        phases: in order of their beginning.
        prefills: ascending; a gap that begins, ends or lies at one of these times says nothing about
            updates and is left out.
    """
    found: list[list[float]] = [[] for _ in phases]
    begins = [phase.began for phase in phases]
    for start, end in pairwise(times):
        if bisect_right(prefills, end) > bisect_left(prefills, start):
            continue
        last = bisect_right(begins, end) - 1  # the last phase that began before the gap ended
        if last >= 0 and phases[last].ended >= start:
            found[last].append((end - start) * 1e3)
    return found


def rate(steps: Sequence[Step], began: float, ended: float) -> tuple[int, float]:
    """(tokens, seconds) of the whole steps around a window, so that short windows are not a step too many or
    too few."""
    times = [step.at for step in steps]
    first, last = max(0, bisect_right(times, began) - 1), min(len(times) - 1, bisect_left(times, ended))
    return sum(step.requests for step in steps[first:last]), times[last] - times[
        first
    ] if last > first else 0.0


def spread(values: Iterable[float]) -> dict[str, float]:
    """{"n", "p50", "p99", "max"}; of nothing {"n": 0}."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }
