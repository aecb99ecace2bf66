"""Summarizes the curves of several seeds: means with 95 % confidence bands, and crossings.

Pure functions of numbers. For S seeds a band is the mean -+ t * s / sqrt(S), with Student's t of S - 1
degrees of freedom, because S is small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; 1.96 is used beyond them."""
SMOOTHED = 5
"""Number of points over which a training reward is averaged before it is compared with a threshold."""
Point = tuple[float, float, float]
"""(samples, seconds, score)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over seeds."""

    value: float
    half: float | None
    """Half the width of the 95 % confidence interval; None for one seed."""
    seeds: int

    def __str__(self) -> str:
        centre, half = (",.0f", ",.0f") if abs(self.value) >= 100 else (".3g", ".2g")
        return f"{self.value:{centre}}" + ("" if self.half is None else f" ± {self.half:{half}}")


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of `values`, one per seed."""
    count = len(values)
    centre = math.fsum(values) / count
    if count == 1:
        return Mean(centre, None, 1)
    deviation = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (count - 1))
    t = T_975[count - 2] if count - 2 < len(T_975) else 1.96
    return Mean(centre, t * deviation / math.sqrt(count), count)


def band(
    curves: Sequence[Sequence[Point]], axis: int, points: int = 41
) -> tuple[NDArray[np.float64], list[Mean]]:
    """Return a grid over an axis of the curves, 0 (samples) or 1 (seconds), and the mean score at each point.

    The grid covers the common range of all curves; scores are interpolated.
    """
    first = max(curve[0][axis] for curve in curves)
    last = min(curve[-1][axis] for curve in curves)
    grid = np.linspace(first, last, points)
    rows = [np.interp(grid, [p[axis] for p in curve], [p[2] for p in curve]) for curve in curves]
    return grid, [mean_of([float(row[place]) for row in rows]) for place in range(points)]


def smooth(scores: Sequence[float], window: int) -> list[float]:
    """Return the moving average of the scores over the last `window` values, fewer at the start."""
    return [
        math.fsum(scores[max(0, place - window + 1) : place + 1]) / min(place + 1, window)
        for place in range(len(scores))
    ]


def crossing(curve: Sequence[Point], axis: int, threshold: float) -> float | None:
    """Return the interpolated position at which the score first reaches the threshold; None if never."""
    before = curve[0]
    for point in curve:
        if point[2] >= threshold:
            rise = point[2] - before[2]
            share = (threshold - before[2]) / rise if rise > 0 else 1.0
            return before[axis] + max(0.0, share) * (point[axis] - before[axis])
        before = point
    return None


def final(curve: Sequence[Point]) -> float:
    """Return the mean score of the last eighth of the points, at least one."""
    count = max(1, len(curve) // 8)
    return math.fsum(point[2] for point in curve[-count:]) / count


def shares(histograms: Sequence[dict[int, int]]) -> dict[int, float]:
    """Return the share of each lag among the trained tokens of all seeds."""
    total = sum(sum(histogram.values()) for histogram in histograms)
    lags = sorted({lag for histogram in histograms for lag in histogram})
    return {lag: sum(histogram.get(lag, 0) for histogram in histograms) / max(1, total) for lag in lags}


def mean_lag(histogram: dict[int, int]) -> float:
    """Return the mean lag of the trained tokens."""
    return sum(lag * count for lag, count in histogram.items()) / max(1, sum(histogram.values()))
