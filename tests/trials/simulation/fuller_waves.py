"""Simulates groups of samples, to see what fills the waves of generation: places, order, or fewer samples.

    python -m tests.trials.simulation.fuller_waves [--steps N] [--seeds K]

As `waves`, with groups of `SAMPLES` samples that end one by one, and a pool that decodes a limited number of
samples at a time.
"""

import itertools
import math
import statistics
from dataclasses import replace

from protocol.staleness import Bound, Policy
from tests.trials.simulation.waves import STEPS_S, Setting, Waves, argument_parser, row

SAMPLES = 8
PLACES = 0.5, 1.0, math.inf
"""Samples that the pool decodes at a time, in batches of B groups."""
WAYS = {
    "by sample": {"leases": "samples"},
    "in the queue": {"leases": "queue"},
    "longest first": {"sorted_batches": 1},
    "longest first, by sample": {"sorted_batches": 1, "leases": "samples"},
    "longest first of 4 B": {"sorted_batches": 4},
    "first 7": {"keep": 7},
    "first 6": {"keep": 6},
}
"""Name -> what differs from leases by group."""


def bias(setting: Setting, seeds: int) -> tuple[float, float]:
    """Return the mean length of kept samples, and what cancelled ones had, by the mean without `keep`."""
    kept, cancelled, all_ = [], [], []
    for seed in range(seeds):
        tally = Waves(replace(setting, seed=seed)).run()
        kept += tally.kept
        cancelled += tally.cancelled
        all_ += Waves(replace(setting, seed=seed, keep=0)).run().kept
    mean = statistics.mean(all_)
    return statistics.mean(kept) / mean, statistics.mean(cancelled) / mean


def line(setting: Setting, seeds: int) -> str:
    """Return a row of Markdown: leases by group, then the rates of each other way as shares of its."""
    by_group = row(setting, seeds)
    cells = [f"{setting.step_s:.0f}", str(setting.bound.max_staleness)]
    cells += [f"{setting.slots / SAMPLES / setting.bound.groups_per_step:g}"]
    cells += [f"{by_group[name]:.2f}" for name in ("trainer_idle", "engine_idle", "mean_lag")]
    for way in WAYS.values():
        found = row(replace(setting, **way), seeds)  # type: ignore[arg-type]
        cells.append(
            " / ".join(f"{found[rate] / by_group[rate]:.2f}" for rate in ("steps_per_h", "tokens_per_s"))
        )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print a row for each setting, then the lengths of kept and of cancelled samples."""
    args = argument_parser(__doc__).parse_args()
    for step_s, staleness, places in itertools.product(STEPS_S, (0, 1, 2), PLACES):
        bound = Bound(staleness, args.groups_per_step, Policy.WAIT)
        slots = places * args.groups_per_step * SAMPLES
        setting = Setting(bound, step_s, steps=args.steps, samples=SAMPLES, width=SAMPLES, slots=slots)
        print(line(setting, args.seeds), flush=True)
    bound = Bound(1, args.groups_per_step, Policy.WAIT)
    for keep in (7, 6):
        setting = Setting(bound, STEPS_S[0], steps=args.steps, samples=SAMPLES, width=SAMPLES, keep=keep)
        kept, cancelled = bias(setting, args.seeds)
        few = row(replace(setting, samples=keep, keep=0), args.seeds)
        steps = row(setting, args.seeds)["steps_per_h"] / few["steps_per_h"]
        print(
            f"first {keep} of {SAMPLES}: kept {kept:.2f}, cancelled after {cancelled:.2f} of the mean "
            f"length; {steps:.2f} of the steps with {keep} samples"
        )


if __name__ == "__main__":
    main()
