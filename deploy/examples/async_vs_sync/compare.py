"""Compares asynchronous with synchronous training on the same number of samples.

Makes one run per bound and seed, then a table and a picture with 95 % confidence bands over the seeds:

    python deploy/examples/async_vs_sync/compare.py deploy/configs/demo.toml --out runs/async_vs_sync
        [--bounds 0,1,2,4] [--seeds 0,1,2,3,4] [--steps N] [--set a.b=c]

E = 0 is synchronous and exactly on-policy: engines generate nothing during a step. All runs have the same
steps, groups and samples; only `bound.max_staleness` and the seeds differ. Runs are sequential, so that each
has the machine to itself. Completed runs in OUT are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bands import SMOOTHED, Point, band, crossing, final, mean_lag, mean_of, shares, smooth

SEED_SETTINGS = ("trainer.seed", "prompts.seed")


@dataclass(frozen=True)
class Curve:
    """Training curve of one run."""

    points: Sequence[Point]
    """Points by step: trained samples, seconds since the first batch was complete (without the engine's
    start), and the mean reward of the last five steps."""
    tokens_per_s: float
    engine_busy: float | None
    lags: Mapping[int, int]
    """Lag -> number of trained tokens."""


def read_curve(run_dir: Path) -> Curve:
    """Read the run's step reports as a curve."""
    steps: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    samples_per_group = json.loads((run_dir / "settings.json").read_text())["sampling"]["samples_per_prompt"]
    began = steps[0]["time"] - steps[0]["train_s"] - steps[0]["publish_s"]
    samples, points, lags = 0, [], {}
    for step, reward in zip(steps, smooth([step["reward_mean"] for step in steps], SMOOTHED), strict=True):
        samples += step["groups"] * samples_per_group
        points.append((float(samples), step["time"] - began, reward))
        for lag, tokens in step["lag_histogram"].items():
            lags[int(lag)] = lags.get(int(lag), 0) + tokens
    tokens = sum(step["trained_tokens"] for step in steps)
    busy = [step["engine_busy"] for step in steps if step["engine_busy"] is not None]
    return Curve(points, tokens / points[-1][1], sum(busy) / len(busy) if busy else None, lags)


def make_run(
    config: Path, run_dir: Path, bound: int, seed: int, steps: int | None, settings: Sequence[str]
) -> None:
    """Run `tether up` for one bound and seed; exit if it fails."""
    overrides = [
        f"bound.max_staleness={bound}",
        "eval.at_end=false",
        *(f"{name}={seed}" for name in SEED_SETTINGS),
        *settings,
    ]
    command = [sys.executable, "-m", "services.cli", "up", str(config), "--run-dir", str(run_dir)]
    command += ["--steps", str(steps)] if steps else []
    command += [part for override in overrides for part in ("--set", override)]
    print(f"E={bound} seed={seed}: {' '.join(command[1:])}", flush=True)
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"the run in {run_dir} failed; its logs are there")


COLUMNS: dict[str, Callable[[Curve, float], float | None]] = {
    "reward at the end": lambda curve, _: final(curve.points),
    "samples to {0:g}": lambda curve, reach: crossing(curve.points, 0, reach),
    "seconds to {0:g}": lambda curve, reach: crossing(curve.points, 1, reach),
    "seconds": lambda curve, _: curve.points[-1][1],
    "tokens/s": lambda curve, _: curve.tokens_per_s,
    "engine busy": lambda curve, _: curve.engine_busy,
    "mean lag": lambda curve, _: mean_lag(dict(curve.lags)),
}
"""Heading -> value for one run, given the target reward; None if it was not reached or measured."""


def table(curves: Mapping[int, Sequence[Curve]], reach: float) -> str:
    """Render a row per bound: means over its runs with 95 % confidence intervals.

    Args:
        curves: bound -> one curve per seed.
        reach: target reward, for the columns of samples and seconds.
    """
    head = ["E", "seeds", *(title.format(reach) for title in COLUMNS)]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for bound, mine in sorted(curves.items()):
        cells = [str(bound), str(len(mine))]
        for read in COLUMNS.values():
            there = [value for curve in mine if (value := read(curve, reach)) is not None]
            cells.append(str(mean_of(there)) if len(there) == len(mine) else f"{len(there)} of {len(mine)}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(curves: Mapping[int, Sequence[Curve]], path: Path) -> None:
    """Draw reward against samples and against time with confidence bands, and the lags of trained tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_samples, by_time, lags) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    width = 0.8 / len(curves)
    for place, (bound, mine) in enumerate(sorted(curves.items())):
        color = f"C{place}"
        for axis, axes in enumerate((by_samples, by_time)):
            grid, means = band([curve.points for curve in mine], axis)
            axes.plot(grid, [mean.value for mean in means], color=color, label=f"E = {bound}")
            low, high = ([mean.value + sign * (mean.half or 0) for mean in means] for sign in (-1, 1))
            axes.fill_between(grid, low, high, color=color, alpha=0.15, lw=0)
        found = shares([dict(curve.lags) for curve in mine])
        middles = [lag + width * (place - (len(curves) - 1) / 2) for lag in found]
        lags.bar(middles, list(found.values()), width=width, color=color)
    labels = ("samples trained", "seconds", "lag of trained tokens, versions")
    for axes, label in zip((by_samples, by_time, lags), labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_samples.set_ylabel("mean reward, five steps")
    lags.set_ylabel("share")
    by_samples.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Make the missing runs, then the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bounds", default="0,1,2,4")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--reach", type=float, default=0.8, help="reward whose samples and seconds are told")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    arguments = parser.parse_args()
    curves: dict[int, list[Curve]] = {}
    for seed in map(int, arguments.seeds.split(",")):
        for bound in map(int, arguments.bounds.split(",")):
            run_dir = arguments.out / f"e{bound}_seed{seed}"
            if not (run_dir / "done").exists():
                make_run(arguments.config, run_dir, bound, seed, arguments.steps, arguments.settings)
                (run_dir / "done").touch()
            curves.setdefault(bound, []).append(read_curve(run_dir))
    text = table(curves, arguments.reach)
    (arguments.out / "table.md").write_text(text + "\n")
    draw(curves, arguments.out / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
