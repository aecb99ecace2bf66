"""Compares asynchronous with synchronous training on the same number of samples.

Makes one run for each bound and seed, then a table and a picture:

    python deploy/examples/async_vs_sync/compare.py deploy/configs/demo.toml --out runs/async_vs_sync
        [--bounds 0,1,2,4] [--seeds 0,1] [--steps N] [--set a.b=c]

E = 0 is synchronous and exactly on-policy: nothing is generated while a step is made. Every run has the same
steps, groups and samples; only `bound.max_staleness` and the seeds differ. Runs are made one after the other,
so that each has the machine to itself. A run that is complete in OUT is not made again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED_SETTINGS = ("trainer.seed", "prompts.seed")
LAST = 10
"""Steps that a final reward is the mean of."""


@dataclass(frozen=True)
class Curve:
    """One run, by step."""

    bound: int
    seed: int
    rewards: Sequence[float]
    samples: Sequence[int]
    """Samples trained up to each step."""
    seconds: Sequence[float]
    """Since the first batch was complete: the start of the engine does not count."""
    lag_mean: float
    engine_busy: float
    tokens_per_s: float
    lag_histogram: dict[int, int]

    @property
    def final(self) -> float:
        return statistics.mean(self.rewards[-LAST:])


def read_curve(run_dir: Path, bound: int, seed: int, samples_per_group: int) -> Curve:
    """Read the run's metrics.jsonl as a curve."""
    steps: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    began = steps[0]["time"] - steps[0]["train_s"] - steps[0]["publish_s"]
    samples, trained, histogram = 0, [], {}
    for step in steps:
        samples += step["groups"] * samples_per_group
        trained.append(samples)
        for lag, tokens in step["lag_histogram"].items():
            histogram[int(lag)] = histogram.get(int(lag), 0) + tokens
    seconds = [step["time"] - began for step in steps]
    tokens = sum(step["trained_tokens"] for step in steps)
    lag = sum(lag * count for lag, count in histogram.items()) / max(1, sum(histogram.values()))
    shares = [step["engine_busy"] for step in steps if step["engine_busy"] is not None]
    busy = statistics.mean(shares) if shares else float("nan")
    rewards = [step["reward_mean"] for step in steps]
    return Curve(bound, seed, rewards, trained, seconds, lag, busy, tokens / seconds[-1], histogram)


def make_run(
    config: Path, run_dir: Path, bound: int, seed: int, steps: int | None, settings: Sequence[str]
) -> None:
    """`tether up` for one bound and seed; ends this program if it fails."""
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


def table(curves: Sequence[Curve], reach: float) -> str:
    """Render a row for each bound: means over the seeds, and each seed's value for what is compared."""
    head = (
        "E",
        "final reward",
        f"samples to {reach:g}",
        f"seconds to {reach:g}",
        "seconds",
        "tokens/s",
        "engine busy",
        "mean lag",
    )
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for bound in sorted({curve.bound for curve in curves}):
        mine = [curve for curve in curves if curve.bound == bound]
        first = [
            next(
                (
                    i
                    for i in range(len(c.rewards))
                    if statistics.mean(c.rewards[max(0, i - 4) : i + 1]) >= reach
                ),
                None,
            )
            for c in mine
        ]
        samples = ", ".join(
            "never" if i is None else str(c.samples[i]) for c, i in zip(mine, first, strict=True)
        )
        seconds = ", ".join(
            "never" if i is None else f"{c.seconds[i]:.1f}" for c, i in zip(mine, first, strict=True)
        )
        means = [
            statistics.mean(getattr(c, name) for c in mine)
            for name in ("tokens_per_s", "engine_busy", "lag_mean")
        ]
        finals = ", ".join(f"{c.final:.3f}" for c in mine)
        whole = ", ".join(f"{c.seconds[-1]:.1f}" for c in mine)
        rates = f"{means[0]:.0f} | {means[1]:.2f} | {means[2]:.2f}"
        rows.append(f"| {bound} | {finals} | {samples} | {seconds} | {whole} | {rates} |")
    return "\n".join(rows)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Reward against samples and against time, and the lags of trained tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_samples, by_time, lags) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    bounds = sorted({curve.bound for curve in curves})
    for curve in curves:
        color, label = (
            f"C{bounds.index(curve.bound)}",
            f"E = {curve.bound}" if curve.seed == curves[0].seed else None,
        )
        smooth = [statistics.mean(curve.rewards[max(0, i - 4) : i + 1]) for i in range(len(curve.rewards))]
        by_samples.plot(curve.samples, smooth, color=color, label=label)
        by_time.plot(curve.seconds, smooth, color=color, label=label)
    for place, bound in enumerate(bounds):
        mine = [curve.lag_histogram for curve in curves if curve.bound == bound]
        total = sum(sum(histogram.values()) for histogram in mine)
        shares = {
            lag: sum(histogram.get(lag, 0) for histogram in mine) / total
            for histogram in mine
            for lag in histogram
        }
        lags.bar(
            [lag + 0.2 * (place - len(bounds) / 2) for lag in shares],
            list(shares.values()),
            width=0.2,
            color=f"C{place}",
        )
    for axes, label in (
        (by_samples, "samples trained"),
        (by_time, "seconds"),
        (lags, "lag of trained tokens, versions"),
    ):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_samples.set_ylabel("mean reward, five steps")
    lags.set_ylabel("share")
    by_samples.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Make the runs that are missing, then the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bounds", default="0,1,2,4")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--reach", type=float, default=0.8, help="reward whose samples and seconds are told")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    arguments = parser.parse_args()
    curves = []
    for seed in map(int, arguments.seeds.split(",")):
        for bound in map(int, arguments.bounds.split(",")):
            run_dir = arguments.out / f"e{bound}_seed{seed}"
            if not (run_dir / "done").exists():
                make_run(arguments.config, run_dir, bound, seed, arguments.steps, arguments.settings)
                (run_dir / "done").touch()
            settings = json.loads((run_dir / "settings.json").read_text())
            curves.append(read_curve(run_dir, bound, seed, settings["sampling"]["samples_per_prompt"]))
    text = table(curves, arguments.reach)
    (arguments.out / "table.md").write_text(text + "\n")
    draw(curves, arguments.out / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
