"""Simulates one engine pool and its trainer, to see whether leases that come in waves cost throughput.

    python -m tests.trials.simulation.waves [--steps N] [--seeds K] [--colocated]

Decisions are those of `protocol.staleness`; only time is simulated. The groups in generation share the pool
as requests share a batch: each advances by 1 / (1 + n / KNEE) tokens per unit of time, n being their number.
`fuller_waves` divides groups into samples; here a group is one.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from protocol.staleness import Bound, Policy, admits, deadline, holds
from tests.trials.simulation.admission import ADMISSIONS, View

KNEE = 16
"""Groups at which each advances half as fast as alone."""
MEDIAN, SIGMA, LONGEST = 10.0, 0.7, 60.0
"""Seconds that a group takes alone: log-normal, cut off."""
SPREADS = 0.5, 0.5
"""Sigma of the prompts' medians, and of the samples of a prompt, where a group is several samples."""
ERROR = 0.5 / math.sqrt(8)
"""Sigma of a prompt's median as eight earlier samples tell it."""
APPLY_S = 2.0
"""From a commit until the engines serve the version, where the trainer has a device of its own."""
SWITCH_S = 1.0
"""To hand a shared device over, each time."""
STEPS_S = (5.0, 15.0, 45.0)
"""Seconds of a step: generation is the bottleneck, neither is, the trainer is."""
RATES = ("steps_per_h", "tokens_per_s")
"""What is printed as a ratio to `greedy`: steps, and tokens that carry gradient."""
WARM_UP = 20
"""Steps that are not counted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    bound: Bound
    step_s: float
    colocated: bool = False
    """Whether trainer and engines take turns on one device: no group advances during a step."""
    admission: str = "greedy"
    seed: int = 0
    steps: int = 300
    samples: int = 1
    """Samples of a group."""
    width: int = 1
    """Samples that slow each other as `KNEE` says of a group."""
    keep: int = 0
    """Samples after which a group is scored, and the others are cancelled; 0: all."""
    slots: float = math.inf
    """Samples that the pool decodes at a time; others wait for a place."""
    leases: str = "groups"
    """What has to have a place before a lease: all samples of the group, or with `samples` one. With `queue`
    rule F alone decides."""
    sorted_batches: int = 0
    """So many batches of prompts at a time come longest first, by what earlier samples of a prompt took."""


@dataclass(slots=True)
class Group:
    """A group that is being generated or scored."""

    version: int
    due: int
    samples: list[tuple[float, float]] = field(default_factory=list)
    """Progress of the pool when each finished sample began and ended."""


@dataclass(slots=True)
class Tally:
    """What was counted after the warm-up."""

    time_s: float = 0.0
    training_s: float = 0.0
    generating_s: float = 0.0
    neither_s: float = 0.0
    steps: int = 0
    at_once: int = 0
    """Steps that began when the one before them ended."""
    lags: Counter[int] = field(default_factory=Counter)
    """Tokens by lag at their step; under `mask` those beyond the bound carry no gradient."""
    dropped: int = 0
    kept: list[float] = field(default_factory=list)
    """Lengths of finished samples."""
    cancelled: list[float] = field(default_factory=list)
    """What cancelled samples had of theirs."""


class Waves:
    """One engine pool, one trainer; `run` makes all steps."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.bound = setting, setting.bound
        self.tally = Tally()
        self._random = random.Random(setting.seed)
        self._now = self._progress = 0.0
        self._live: list[Group] = []
        self._waiting: deque[tuple[float, Group]] = deque()
        """Length and group of samples that have no place."""
        self._decoded: list[tuple[float, int, float, Group]] = []
        """Heap of samples that have one: progress at their end, number, progress at their begin, group."""
        self._medians: list[float] = []
        """Median lengths of samples of the next prompts, the next one last."""
        self._scored: list[Group] = []
        self._order = 0
        self._version = self._served = 0
        self._changes: list[float] = [0.0]
        """Progress at which each version was served first."""
        self._step_ends = self._served_at = math.inf
        self._device_free = 0.0
        self._committed = 0.0
        self._leased, self._period_s = -math.inf, 0.0

    def run(self) -> Tally:
        """Make all steps; returns what was counted."""
        while self._version < self.setting.steps:
            self._lease()
            self._take()
            self._lease()
            self._advance()
        return self.tally

    @property
    def _running(self) -> bool:
        return self._step_ends < math.inf

    def _deadlines(self) -> list[int]:
        return [group.due for group in self._live] + [group.due for group in self._scored]

    def _speed(self) -> float:
        asleep = self.setting.colocated and (self._running or self._now < self._device_free)
        return 0.0 if asleep else 1 / (1 + len(self._decoded) / self.setting.width / KNEE)

    def _lease(self) -> None:
        asleep = self.setting.colocated and (self._running or self._now < self._device_free)
        step = self._version + self._running
        due = deadline(self._served, self.bound.max_staleness)
        while (
            not asleep
            and self._has_place()
            and admits(self._deadlines(), due, step, self.bound)
            and self._admitted(due)
        ):
            group = Group(self._served, due)
            self._live.append(group)
            self._waiting += [(length, group) for length in self._lengths()]
            self._begin_samples()
            self._leased = self._now

    def _has_place(self) -> bool:
        n, taken = self.setting.samples, len(self._decoded) + len(self._waiting)
        return {
            "groups": (len(self._live) + 1) * n <= self.setting.slots,
            "samples": taken < self.setting.slots,
            "queue": True,
        }[self.setting.leases]

    def _lengths(self) -> list[float]:
        """Return the lengths of a group's samples, in seconds that they would take alone."""
        n, batches = self.setting.samples, self.setting.sorted_batches
        if not self._medians:
            spread = SIGMA if n == 1 else SPREADS[0]
            many = max(1, batches * self.bound.groups_per_step)
            self._medians = [self._random.lognormvariate(math.log(MEDIAN), spread) for _ in range(many)]
            if batches:
                self._medians.sort(key=lambda length: length * self._random.lognormvariate(0, ERROR))
        median = self._medians.pop()
        if n == 1:
            return [min(median, LONGEST)]
        return [min(self._random.lognormvariate(math.log(median), SPREADS[1]), LONGEST) for _ in range(n)]

    def _begin_samples(self) -> None:
        while self._waiting and len(self._decoded) < self.setting.slots:
            length, group = self._waiting.popleft()
            self._order += 1
            heapq.heappush(self._decoded, (self._progress + length, self._order, self._progress, group))

    def _remove(self, group: Group) -> None:
        """End the samples of a group that are being generated, or wait."""
        self._live.remove(group)
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not group)
        self._decoded = [entry for entry in self._decoded if entry[3] is not group]
        heapq.heapify(self._decoded)
        self._begin_samples()

    def _admitted(self, due: int) -> bool:
        groups = self._live
        return ADMISSIONS[self.setting.admission](
            View(
                groups_per_step=self.bound.groups_per_step,
                max_staleness=self.bound.max_staleness,
                same_version=sum(group.due == due for group in [*groups, *self._scored]),
                live=len(groups),
                late_live=sum(group.due < due for group in groups),
                since_lease_s=self._now - self._leased,
                step_period_s=self._period_s,
            )
        )

    def _take(self) -> None:
        """Begin a step if a batch is scored and the policy lets it be taken, as the ledger's `take` does."""
        size, bound = self.bound.groups_per_step, self.bound
        if self._running or self._now < self._device_free:
            return
        if bound.policy is Policy.MASK:
            stale = [g for g in self._scored if self._newest(g) < self._version - bound.max_staleness]
            self._scored = [group for group in self._scored if group not in stale]
            self._count_dropped(len(stale))
        if len(self._scored) < size:
            return
        self._scored.sort(key=lambda group: group.due)
        rest = self._scored[size:]
        while bound.policy is not Policy.MASK and not holds(
            [*(g.due for g in self._live), *(g.due for g in rest)], self._version + 1, bound
        ):
            if bound.policy is Policy.WAIT or not self._live:
                return
            self._remove(min(self._live, key=lambda group: group.due))
            self._count_dropped(1)
        if self._version >= WARM_UP:
            self.tally.at_once += self._now <= self._committed + SWITCH_S * self.setting.colocated
            self.tally.lags.update(self._lags(self._scored[:size]))
        self._scored = rest
        self._step_ends = self._now + self.setting.step_s + SWITCH_S * self.setting.colocated

    def _count_dropped(self, groups: int) -> None:
        self.tally.dropped += groups * (self._version >= WARM_UP)

    def _newest(self, group: Group) -> int:
        """Return the version of a group's last token."""
        later = self._changes[group.version + 1 :]
        last = max(end for _, end in group.samples)
        return group.version + sum(at < last for at in later)

    def _lags(self, batch: list[Group]) -> Counter[int]:
        """Return the batch's tokens by lag."""
        lags: Counter[int] = Counter()
        samples = [(group.version, *sample) for group in batch for sample in group.samples]
        for first, began, ended in samples:
            starts = [max(at, began) for at in self._changes[first:]]
            ends = [*starts[1:], math.inf]
            for version, (start, end) in enumerate(zip(starts, ends, strict=True), first):
                end = min(end, ended)
                if end > start:
                    lags[self._version - version] += round(1000 * (end - start))
        return lags

    def _advance(self) -> None:
        """Continue with the next event: a group scored, a step's end, a version served, a lease due again."""
        speed = self._speed()
        times = [self._step_ends, self._served_at]
        if self._decoded and speed:
            times.append(self._now + max(0.0, self._decoded[0][0] - self._progress) / speed)
        if self._device_free > self._now:
            times.append(self._device_free)
        if self.setting.admission == "paced":
            times.append(
                max(self._now, self._leased) + self._period_s / (2 * self.bound.groups_per_step) + 1e-3
            )
        until = min(times)
        assert until < math.inf, f"nothing happens any more at {self._now}: {self.setting}"
        self._count(until - self._now, speed)
        self._progress += speed * (until - self._now)
        self._now = until
        while self._decoded and self._decoded[0][0] <= self._progress + 1e-9:
            ended, _, began, group = heapq.heappop(self._decoded)
            self._finish_sample(group, began, ended)
            self._begin_samples()
        if self._now >= self._step_ends:
            self._commit()
        if self._now >= self._served_at:
            self._served_at = math.inf
            self._changes += [self._progress] * (self._version - self._served)
            self._served = self._version

    def _finish_sample(self, group: Group, began: float, ended: float) -> None:
        group.samples.append((began, ended))
        counted = self._version >= WARM_UP
        if counted:
            self.tally.kept.append(ended - began)
        if len(group.samples) == (self.setting.keep or self.setting.samples):
            if counted:
                rest = [entry for entry in self._decoded if entry[3] is group]
                self.tally.cancelled += [self._progress - entry[2] for entry in rest]
            self._remove(group)
            self._scored.append(group)

    def _commit(self) -> None:
        self._version += 1
        self._step_ends = math.inf
        period_s, self._committed = self._now - self._committed, self._now
        self._period_s = period_s if self._version == 1 else 0.8 * self._period_s + 0.2 * period_s
        self._served_at = self._now + (SWITCH_S if self.setting.colocated else APPLY_S)
        if self.setting.colocated:
            self._device_free = self._now + SWITCH_S

    def _count(self, seconds: float, speed: float) -> None:
        if self._version < WARM_UP:
            return
        generating = bool(self._live) and speed > 0
        self.tally.time_s += seconds
        self.tally.training_s += seconds * self._running
        self.tally.generating_s += seconds * generating
        self.tally.neither_s += seconds * (not generating and not self._running)
        self.tally.steps = self._version + 1 - WARM_UP


def row(setting: Setting, seeds: int) -> dict[str, float]:
    """Return the means over seeds of rates, idle shares, lags, and the shares masked and dropped."""
    rows = []
    for seed in range(seeds):
        tally = Waves(replace(setting, seed=seed)).run()
        tokens, bound = tally.lags.total(), setting.bound
        over = sum(n for lag, n in tally.lags.items() if lag > bound.max_staleness)
        rows.append(
            {
                "steps_per_h": 3600 * tally.steps / tally.time_s,
                "tokens_per_s": (tokens - over) / tally.time_s,
                "trainer_idle": 1 - tally.training_s / tally.time_s,
                "engine_idle": 1 - tally.generating_s / tally.time_s,
                "neither": tally.neither_s / tally.time_s,
                "at_once": tally.at_once / tally.steps,
                "mean_lag": sum(lag * n for lag, n in tally.lags.items()) / tokens,
                "max_lag": max(tally.lags),
                "masked": over / tokens,
                "dropped": tally.dropped / (tally.dropped + tally.steps * bound.groups_per_step),
            }
        )
    return {name: statistics.mean(one[name] for one in rows) for name in rows[0]}


def line(setting: Setting, seeds: int) -> str:
    """Return a row of Markdown: what rule F alone does, then each other rule's rates as shares of its."""
    greedy = row(setting, seeds)
    rules = {name: row(replace(setting, admission=name), seeds) for name in ADMISSIONS if name != "greedy"}
    cells = [f"{setting.step_s:.0f}", setting.bound.policy.value, str(setting.bound.max_staleness)]
    cells += [f"{value:.2f}" for name, value in greedy.items() if name not in RATES]
    cells += [" / ".join(f"{rule[rate] / greedy[rate]:.2f}" for rate in RATES) for rule in rules.values()]
    return "| " + " | ".join(cells) + " |"


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every simulation of waves."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help=f"more than the {WARM_UP} not counted")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--groups-per-step", type=int, default=8)
    return parser


def main() -> None:
    """Print a row for each setting."""
    parser = argument_parser(__doc__)
    parser.add_argument("--colocated", action="store_true")
    args = parser.parse_args()
    for step_s, policy, staleness in itertools.product(STEPS_S, Policy, (0, 1, 2, 4)):
        bound = Bound(staleness, args.groups_per_step, policy)
        print(line(Setting(bound, step_s, args.colocated, steps=args.steps), args.seeds), flush=True)


if __name__ == "__main__":
    main()
