"""Finds the bottleneck of a run from the busy shares that its steps measured."""

from collections.abc import Iterable, Mapping
from typing import Any

BUSY = 0.8
"""Busy share above which a part counts as a bottleneck."""
MIN_STEPS = 3
"""Minimum number of steps for meaningful shares."""
ENGINES, REWARDS, TRAINER = "engines", "rewards", "trainer"
MEASURED = {ENGINES: "engine_busy", REWARDS: "reward_busy"}
"""Part -> field in a step's line with its busy share."""
PARTS = ("train_s", "publish_s", "checkpoint_s", "other_s")
"""Fields in a step's line with working time of the trainer."""
TRAINERS_PART: Mapping[str, str] = {
    "train_s": "more ranks in [parallel], or a larger trainer.micro_batch_tokens",
    "publish_s": "most of it publishes weights: see the transports in docs/weights.md",
    "checkpoint_s": "most of it waits for checkpoints: a larger trainer.checkpoint_every, or a faster disk",
    "other_s": "most of it waits for the ledger, or for the disk of the run directory",
}
"""Trainer's longest part -> suggested change."""
REMEDIES: Mapping[str, str] = {
    ENGINES: "more engines (services.rollouts), or a shorter sampling.max_tokens",
    REWARDS: "more reward.workers or services.rewards, or an asynchronous function for what waits",
}
OVERLAP = (
    "they wait for each other; without a shared GPU a larger bound.max_staleness or "
    "rollout.groups_in_flight lets them overlap"
)


class PartTimes:
    """Working seconds of the parts of a run, without the first step of each trainer.

    A first step includes the start of engines and trainer.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add lines of metrics.jsonl."""
        self._epoch: Any = None
        self._steps = 0
        self._seconds = dict.fromkeys(("step_s", *PARTS), 0.0)
        self._busy = {part: (0.0, 0.0) for part in MEASURED}
        """Part -> its busy seconds, and the seconds of the steps that measured it."""
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        is_first, self._epoch = line.get("epoch") != self._epoch, line.get("epoch")
        step_s = _number(line, "step_s")
        if is_first or not step_s:
            return
        self._steps += 1
        for name in self._seconds:
            self._seconds[name] += _number(line, name) or 0.0
        for part, field in MEASURED.items():
            if (share := _number(line, field)) is not None:
                busy_s, measured_s = self._busy[part]
                self._busy[part] = busy_s + share * step_s, measured_s + step_s

    def shares(self) -> dict[str, float]:
        """Return the busy share of each measured part, 0 to 1; empty before `MIN_STEPS` steps."""
        if self._steps < MIN_STEPS:
            return {}
        worked_s = sum(self._seconds[name] for name in PARTS)
        shares = {TRAINER: worked_s / self._seconds["step_s"]}
        return shares | {part: busy / all_s for part, (busy, all_s) in self._busy.items() if all_s}

    def bottleneck(self) -> str:
        """Return one sentence: the part for which the others wait, all shares, and a suggested change.

        A busy trainer or engine takes precedence over rewards: a slow judge is always busy, but delays the
        run only if engines are idle. Empty without enough measurements.
        """
        shares = self.shares()
        name = next((part for part in _by_share(shares) if shares[part] >= BUSY), "")
        if name:
            rest = ", ".join(f"{part} {shares[part]:.0%}" for part in shares if part != name)
            return (
                f"bottleneck: {name} (busy {shares[name]:.0%}{'; ' * bool(rest)}{rest}): {self._remedy(name)}"
            )
        if not shares.keys() >= {TRAINER, ENGINES}:
            return ""
        return f"bottleneck: none ({', '.join(f'{part} {shares[part]:.0%}' for part in shares)}): {OVERLAP}"

    def _remedy(self, part: str) -> str:
        if part == TRAINER:
            return TRAINERS_PART[max(PARTS, key=lambda name: self._seconds[name])]
        return REMEDIES[part]


def _by_share(shares: Mapping[str, float]) -> list[str]:
    """Return the parts, busiest first, rewards last."""
    return sorted(shares, key=lambda part: (part == REWARDS, -shares[part]))


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) else None
