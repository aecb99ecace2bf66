"""Reads a run as a curve: rewards, held-out scores, lags and what the corrections did, by version."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps

MEASURES = (
    "clip_fraction",
    "behaviour_clip_fraction",
    "importance_capped",
    "importance_rejected",
    "importance_ess",
    "behaviour_kl_k3",
    "grad_norm",
    "entropy",
)
"""Fields of the step report whose means over the run are kept."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    samples: list[int]
    """[steps] samples trained up to each step."""
    seconds: list[float]
    """[steps] since the first batch was complete: the start of the processes does not count."""
    rewards: list[float]
    """[steps] mean training reward of each step."""
    lags: dict[int, int]
    """Lag -> trained tokens, over the whole run."""
    late_lags: dict[int, int]
    """Lag -> trained tokens of the second half of the run, when lags have come up."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Version -> score on held-out prompts; empty if no version was scored."""
    masked_tokens: int = 0
    dropped_groups: int = 0
    skipped_steps: int = 0
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def points(self) -> list[tuple[int, float, float]]:
        """(samples, seconds, score) of the scored versions; without those, of each step's reward."""
        if not self.held_out:
            return list(zip(self.samples, self.seconds, self.rewards, strict=True))
        at = {0: (0, 0.0)} | {
            step + 1: pair for step, pair in enumerate(zip(self.samples, self.seconds, strict=True))
        }
        return [(*at[version], score) for version, score in sorted(self.held_out.items())]

    def write(self, path: Path) -> None:
        """Write it whole, or nothing."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.rename(path)


def load_curve(path: Path) -> Curve:
    """Read what `Curve.write` wrote."""
    fields = json.loads(path.read_text())
    for name in ("lags", "late_lags", "held_out"):
        fields[name] = {int(key): value for key, value in fields[name].items()}
    return Curve(**fields)


def read_curve(run_dir: Path, held_out: dict[int, float]) -> Curve:
    """Read the run's step reports."""
    settings = json.loads((run_dir / "settings.json").read_text())
    steps = read_steps(run_dir / "metrics.jsonl")
    return curve_of(steps, settings["sampling"]["samples_per_prompt"], held_out)


def curve_of(steps: list[dict[str, Any]], samples_per_group: int, held_out: dict[int, float]) -> Curve:
    """Return the curve of these step reports, in order of step."""
    began = steps[0]["time"] - steps[0]["train_s"] - steps[0]["publish_s"]
    samples, total = [], 0
    for step in steps:
        total += step["groups"] * samples_per_group
        samples.append(total)
    measures = {}
    for name in MEASURES:
        found = [step[name] for step in steps if step.get(name) is not None]
        if found:
            measures[name] = math.fsum(found) / len(found)
    return Curve(
        samples=samples,
        seconds=[step["time"] - began for step in steps],
        rewards=[step["reward_mean"] for step in steps],
        lags=_histogram(steps),
        late_lags=_histogram(steps[len(steps) // 2 :]),
        held_out=held_out,
        masked_tokens=sum(step["masked_tokens"] for step in steps),
        dropped_groups=sum(step["dropped_groups"] for step in steps),
        skipped_steps=sum(bool(step["skipped"]) for step in steps),
        measures=measures,
    )


def _histogram(steps: list[dict[str, Any]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for step in steps:
        for lag, tokens in step["lag_histogram"].items():
            found[int(lag)] = found.get(int(lag), 0) + tokens
    return dict(sorted(found.items()))
