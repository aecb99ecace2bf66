"""Summarises the runs of a correction and a bound over their seeds, and writes the summaries as tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.examples.async_vs_sync.bands import (
    SMOOTHED,
    Mean,
    Point,
    crossing,
    final,
    mean_lag,
    mean_of,
    shares,
    smooth,
)
from tests.benchmarks.staleness.curve import Curve
from tests.benchmarks.staleness.grid import TASKS, Cell

Key = tuple[str, str, int]
"""(task, correction, bound)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All seeds of one correction and one bound."""

    seeds: list[int]
    final: Mean
    """Score at the end."""
    area: Mean
    """Mean score over the samples that all runs of the task trained."""
    samples_to: list[float | None]
    """Samples up to the threshold, for each seed."""
    seconds_to: list[float | None]
    seconds: Mean
    """Seconds of all steps."""
    lag: Mean
    late_lag: Mean
    """Mean lag of the second half of a run."""
    lag_shares: dict[int, float]
    """Lag -> share of the trained tokens of the second half."""
    masked_tokens: int
    dropped_groups: int
    skipped_steps: int
    measures: dict[str, float]
    """Means over steps and seeds."""


def points_of(curve: Curve) -> list[Point]:
    """Return the points of a curve, smoothed if they are training rewards."""
    points = curve.points
    if curve.held_out:
        return [(float(x), y, z) for x, y, z in points]
    scores = smooth([score for _, _, score in points], SMOOTHED)
    return [(float(x), y, score) for (x, y, _), score in zip(points, scores, strict=True)]


def by_key(curves: Mapping[Cell, Curve]) -> dict[Key, dict[int, Curve]]:
    """Return seed -> curve for each correction and bound, in the order of the runs."""
    found: dict[Key, dict[int, Curve]] = {}
    for cell, curve in curves.items():
        found.setdefault((cell.task, cell.correction, cell.bound), {})[cell.seed] = curve
    return found


def summarise(curves: Mapping[Cell, Curve]) -> dict[Key, Summary]:
    """Return the summary of each correction and bound of each task."""
    last = {
        task: min(curve.samples[-1] for cell, curve in curves.items() if cell.task == task)
        for task in {cell.task for cell in curves}
    }
    return {
        key: _summary(list(seeds), list(seeds.values()), TASKS[key[0]].threshold, last[key[0]])
        for key, seeds in by_key(curves).items()
    }


def area(curve: Sequence[Point], last: float) -> float:
    """Return the mean score from the curve's beginning to `last` samples, by trapezoids."""
    places = [samples for samples, _, _ in curve if samples < last] + [last]
    if len(places) == 1 or places[0] == last:
        return curve[0][2]
    scores = np.interp(places, [samples for samples, _, _ in curve], [score for _, _, score in curve])
    return float(np.trapezoid(scores, places) / (places[-1] - places[0]))


def _summary(seeds: list[int], curves: list[Curve], threshold: float, last: float) -> Summary:
    points = [points_of(curve) for curve in curves]
    names = [name for name in curves[0].measures if all(name in curve.measures for curve in curves)]
    return Summary(
        seeds=seeds,
        final=mean_of([final(curve) for curve in points]),
        area=mean_of([area(curve, last) for curve in points]),
        samples_to=[crossing(curve, 0, threshold) for curve in points],
        seconds_to=[crossing(curve, 1, threshold) for curve in points],
        seconds=mean_of([curve.seconds[-1] for curve in curves]),
        lag=mean_of([mean_lag(curve.lags) for curve in curves]),
        late_lag=mean_of([mean_lag(curve.late_lags) for curve in curves]),
        lag_shares=shares([curve.late_lags for curve in curves]),
        masked_tokens=sum(curve.masked_tokens for curve in curves),
        dropped_groups=sum(curve.dropped_groups for curve in curves),
        skipped_steps=sum(curve.skipped_steps for curve in curves),
        measures={name: statistics.fmean(curve.measures[name] for curve in curves) for name in names},
    )


def reached(values: Sequence[float | None]) -> str:
    """Return the mean of what the seeds took, or how many got there at all."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return f"{len(there)} of {len(values)}"
    found = mean_of(there)
    return f"{found.value:,.0f} ± {found.half:,.0f}" if found.half is not None else f"{found.value:,.0f}"


HEAD = (
    "E",
    "score at the end",
    "mean score",
    "samples to {0:g}",
    "seconds to {0:g}",
    "seconds for all",
    "mean lag",
    "lag, second half",
    "clipped",
    "weights capped",
    "rejected",
    "ESS",
)
SHARES = ("clip_fraction", "importance_capped", "importance_rejected", "importance_ess")


OVERVIEW = {
    "samples to {0:g}": lambda row: reached(row.samples_to),
    "seconds to {0:g}": lambda row: reached(row.seconds_to),
    "mean score": lambda row: str(row.area),
    "score at the end": lambda row: str(row.final),
}
"""What an overview shows -> how it is read from a summary."""


def overview(task: str, summaries: Mapping[Key, Summary]) -> str:
    """Return each number of `OVERVIEW` as a Markdown table of corrections by bounds."""
    keys = [key for key in summaries if key[0] == task]
    bounds = sorted({key[2] for key in keys})
    parts = []
    for title, read in OVERVIEW.items():
        head = [title.format(TASKS[task].threshold), *(f"E = {bound}" for bound in bounds)]
        rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for correction in dict.fromkeys(key[1] for key in keys):
            found = [summaries.get((task, correction, bound)) for bound in bounds]
            cells = ["" if row is None else read(row) for row in found]
            rows.append(f"| {correction} | {' | '.join(cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def table(task: str, summaries: Mapping[Key, Summary]) -> str:
    """Return the summaries of a task as Markdown, a table for each correction."""
    head = [title.format(TASKS[task].threshold) for title in HEAD]
    parts = []
    for correction in dict.fromkeys(key[1] for key in summaries if key[0] == task):
        rows = [f"**{correction}**", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for (_, _, bound), row in sorted(
            (key, row) for key, row in summaries.items() if key[:2] == (task, correction)
        ):
            cells = [
                str(bound),
                str(row.final),
                str(row.area),
                reached(row.samples_to),
                reached(row.seconds_to),
                str(row.seconds),
                f"{row.lag.value:.2f}",
                f"{row.late_lag.value:.2f}",
                *(f"{row.measures[name]:.3g}" if name in row.measures else "" for name in SHARES),
            ]
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def as_json(summaries: Mapping[Key, Summary]) -> list[dict[str, Any]]:
    """Return the summaries as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mean):
            return {"mean": value.value, "half_width_95": value.half}
        return value

    return [
        {
            "task": task,
            "correction": correction,
            "bound": bound,
            **{name: plain(getattr(summary, name)) for name in Summary.__slots__},
        }
        for (task, correction, bound), summary in summaries.items()
    ]
