"""Draws the staleness benchmark: curves with confidence bands, and what each bound costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deploy.examples.async_vs_sync.bands import band, mean_of
from tests.benchmarks.staleness.curve import Curve
from tests.benchmarks.staleness.grid import CORRECTIONS, TASKS, Cell
from tests.benchmarks.staleness.summary import Key, Summary, by_key, points_of

DPI = 110
BESIDE = 0.06
"""Distance of two corrections at one bound, so that their intervals are not on top of each other."""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(
    task: str, curves: Mapping[Cell, Curve], summaries: Mapping[Key, Summary], path: Path
) -> None:
    """Draw a row for each correction: score against samples and seconds, and the lags of the second half."""
    rows = [key for key in by_key(curves) if key[0] == task]
    corrections = list(dict.fromkeys(key[1] for key in rows))
    bounds = sorted({key[2] for key in rows})
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(
        len(corrections), 3, figsize=(14, 3.1 * len(corrections)), squeeze=False, sharex="col"
    )
    for key, seeds in by_key(curves).items():
        if key[0] != task:
            continue
        axes, place = grid[corrections.index(key[1])], bounds.index(key[2])
        points = [points_of(curve) for curve in seeds.values()]
        for axis in (0, 1):
            at, means = band(points, axis)
            values = np.array([mean.value for mean in means])
            halves = np.array([mean.half or 0.0 for mean in means])
            axes[axis].plot(at, values, color=f"C{place}", label=f"E = {key[2]}")
            axes[axis].fill_between(at, values - halves, values + halves, color=f"C{place}", alpha=0.15, lw=0)
        width = 0.8 / len(bounds)
        lags = summaries[key].lag_shares
        shifted = [lag + width * (place - (len(bounds) - 1) / 2) for lag in lags]
        axes[2].bar(shifted, list(lags.values()), width=width, color=f"C{place}")
    what = "held-out score" if TASKS[task].every else "training reward, five steps"
    for row, correction in zip(grid, corrections, strict=True):
        row[0].set_ylabel(f"{correction}\n{what}")
        row[2].set_ylabel("share of tokens")
        for axes in row:
            axes.grid(alpha=0.3)
        for axes in row[:2]:
            axes.axhline(TASKS[task].threshold, color="grey", lw=0.7, ls=":")
            axes.set_ylim(max(0, axes.get_ylim()[0]), min(1, axes.get_ylim()[1]))
    for axes, label in zip(
        grid[-1], ("samples trained", "seconds", "lag, second half of the run"), strict=True
    ):
        axes.set_xlabel(label)
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{task}: mean and 95 % confidence band over seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def draw_summary(summaries: Mapping[Key, Summary], path: Path) -> None:
    """Draw a row for each task: what a threshold costs, the score at the end and the lag, by bound."""
    tasks = list(dict.fromkeys(key[0] for key in summaries))
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(len(tasks), 4, figsize=(17, 3.8 * len(tasks)), squeeze=False)
    for task, row in zip(tasks, grid, strict=True):
        corrections = list(dict.fromkeys(key[1] for key in summaries if key[0] == task))
        for place, correction in enumerate(corrections):
            style = {"color": f"C{list(CORRECTIONS).index(correction)}", "label": correction}
            beside = BESIDE * (place - (len(corrections) - 1) / 2)
            mine = sorted(
                (key[2], found) for key, found in summaries.items() if key[:2] == (task, correction)
            )
            for axes, name in zip(row, ("samples_to", "seconds_to", "final", "late_lag"), strict=True):
                _line(axes, [(bound + beside, getattr(found, name)) for bound, found in mine], style)
        threshold = TASKS[task].threshold
        titles = (
            f"samples to {threshold:g}",
            f"seconds to {threshold:g}",
            "score at the end",
            "mean lag, second half",
        )
        for axes, title in zip(row, titles, strict=True):
            axes.set_ylabel(f"{task}: {title}")
            axes.set_xlabel("bound E")
            axes.grid(alpha=0.3)
        row[3].legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _line(axes: Any, values: list[tuple[float, Any]], style: dict[str, str]) -> None:
    """Draw a mean for each bound with its interval; a bound where a seed never got there is left out."""
    drawn = []
    for bound, value in values:
        if isinstance(value, list):
            if None in value:
                continue
            value = mean_of(value)
        drawn.append((bound, value.value, value.half or 0.0))
    if drawn:
        bounds, means, halves = zip(*drawn, strict=True)
        axes.errorbar(bounds, means, yerr=halves, marker="o", ms=3, capsize=2, lw=1, **style)
